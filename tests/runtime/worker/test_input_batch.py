"""The persistent batch and the step's inputs, against a model with plain lists and loops."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcli.runtime.messages import NewRequestData, RunningRequests, SchedulerOutput
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.input_batch import BatchStateError, InputBatch
from vcli.runtime.worker.metadata import build_step_inputs
from vcli.topology.errors import ExitStatus

BLOCK_SIZE = 4
MAX_SEQS = 5
MAX_LEN = 700


def new_request(number, token_ids, block_ids, *, computed=0, num_prompt=None):
    return NewRequestData(
        number=number,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        num_computed_tokens=computed,
        block_ids=block_ids,
        sampling=SamplingParams(),
    )


def step_of(new=(), running=(), scheduled=(), removed=(), step=1):
    """`running`: (number, token id, computed, new blocks)."""
    columns = [list(column) for column in zip(*running, strict=True)] or [[], [], [], []]
    return SchedulerOutput(
        step=step,
        new=list(new),
        running=RunningRequests(
            numbers=columns[0],
            token_ids=columns[1],
            num_computed_tokens=columns[2],
            new_block_ids=columns[3],
        ),
        num_scheduled_tokens=list(scheduled),
        removed=list(removed),
    )


def batch_of(max_seqs=MAX_SEQS, max_len=MAX_LEN):
    return InputBatch(max_num_seqs=max_seqs, max_model_len=max_len, block_size=BLOCK_SIZE)


@dataclass
class NaiveRequest:
    number: int
    tokens: list[int]
    num_prompt: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    unsent: int = -1


class NaiveScheduler:
    """Makes random but valid steps and says, token by token, what the model has to be given."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.running = []
        self.preempted = []
        self.next_number = 0
        self.next_block = 0

    def _cover(self, request, num_tokens):
        missing = -(-num_tokens // BLOCK_SIZE) - len(request.blocks)
        # Some extra blocks: a scheduler may allocate ahead.
        count = max(missing, 0) + self.random.choice([0, 0, 1])
        limit = -(-MAX_LEN // BLOCK_SIZE)
        count = min(count, limit - len(request.blocks))
        added = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        self.random.shuffle(added)
        request.blocks += added
        return added

    def _leave(self):
        removed = []
        for request in list(self.running):
            fate = self.random.random()
            if fate < 0.15:
                removed.append(request.number)
                self.running.remove(request)
            elif fate < 0.25:
                removed.append(request.number)
                self.running.remove(request)
                request.blocks, request.computed, request.unsent = [], 0, -1
                self.preempted.append(request)
        return removed

    def _start(self):
        started = []
        while len(self.running) + len(started) < MAX_SEQS and self.random.random() < 0.5:
            if self.preempted and self.random.random() < 0.5:
                request = self.preempted.pop(0)
            else:
                length = self.random.choice([1, 2, 3, 4, 5, 9, 30, 300])
                tokens = [self.random.randrange(1000) for _ in range(length)]
                request = NaiveRequest(self.next_number, tokens, length)
                self.next_number += 1
            request.computed = self.random.choice([0, 0, (len(request.tokens) - 1) // 4 * 4])
            started.append(request)
        return started

    def step(self, number):
        removed = self._leave()
        started = self._start()
        chosen = [request for request in self.running if self.random.random() < 0.8]
        self.random.shuffle(chosen)
        scheduled, new, running, expected = [], [], [], []
        for request in started + chosen:
            left = len(request.tokens) - request.computed
            count = left if self.random.random() < 0.6 else self.random.randint(1, left)
            added = self._cover(request, request.computed + count)
            scheduled.append(count)
            if request in started:
                new.append(
                    new_request(
                        request.number,
                        list(request.tokens),
                        list(request.blocks),
                        computed=request.computed,
                        num_prompt=request.num_prompt,
                    )
                )
            else:
                running.append((request.number, request.unsent, request.computed, added))
            expected.append((request, request.computed, count))
            request.unsent = -1
        self.running += started
        return step_of(new, running, scheduled, removed, step=number), expected

    def advance(self, expected):
        for request, computed, count in expected:
            request.computed = computed + count
            if request.computed == len(request.tokens) and len(request.tokens) < MAX_LEN:
                request.unsent = self.random.randrange(1000)
                request.tokens.append(request.unsent)
            elif request.computed == len(request.tokens):
                # Full: a real scheduler ends it.
                request.computed -= 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_inputs_equal_those_of_plain_loops_over_any_life_of_requests(seed):
    scheduler, batch = NaiveScheduler(seed), batch_of()
    for number in range(25):
        output, expected = scheduler.step(number)
        step = batch.apply(output)
        assert step.numbers == [request.number for request, _, _ in expected]
        assert step.samples.tolist() == [
            computed + count == len(request.tokens) for request, computed, count in expected
        ]
        assert sorted(batch.numbers) == sorted(request.number for request in scheduler.running)
        if expected:
            _check_inputs(build_step_inputs(batch, step), expected)
        scheduler.advance(expected)


def _check_inputs(inputs, expected):
    ids, positions, slots, starts, seq_lens = [], [], [], [0], []
    for request, computed, count in expected:
        for position in range(computed, computed + count):
            ids.append(request.tokens[position])
            positions.append(position)
            block = request.blocks[position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(starts[-1] + count)
        seq_lens.append(computed + count)
    width = -(-max(seq_lens) // BLOCK_SIZE)
    tables = [(request.blocks + [0] * width)[:width] for request, _, _ in expected]
    assert inputs.input_ids_T.tolist() == ids
    assert inputs.positions_T.tolist() == positions
    assert inputs.slot_mapping_T.tolist() == slots
    assert inputs.query_start_loc.tolist() == starts
    assert inputs.seq_lens_R.tolist() == seq_lens
    assert inputs.block_tables_RB.tolist() == tables
    assert inputs.input_ids_T.dtype == inputs.positions_T.dtype == np.int64
    assert inputs.slot_mapping_T.dtype == np.int64
    assert inputs.block_tables_RB.dtype == inputs.query_start_loc.dtype == np.int32


def test_block_tables_of_a_step_are_copies_that_leave_the_batch_alone():
    batch = batch_of()
    step = batch.apply(step_of([new_request(0, [1] * 6, [7, 8])], scheduled=[6]))
    build_step_inputs(batch, step).block_tables_RB[:] = 99
    assert batch.block_table[0, :2].tolist() == [7, 8]


def test_removed_row_is_free_for_a_request_of_the_same_step():
    batch = batch_of(max_seqs=1)
    batch.apply(step_of([new_request(0, [1], [0])], scheduled=[1]))
    batch.apply(step_of([new_request(1, [2], [1])], scheduled=[1], removed=[0]))
    assert batch.numbers == [1]


def test_preempted_number_comes_back_with_what_it_had_generated():
    batch = batch_of()
    batch.apply(step_of([new_request(3, [1, 2], [0])], scheduled=[2]))
    batch.apply(step_of(removed=[3]))
    resumed = new_request(3, [1, 2, 50], [4], num_prompt=2)
    step = batch.apply(step_of([resumed], scheduled=[3]))
    row = step.rows[0]
    assert batch.num_tokens[row] == 3
    assert batch.num_prompt_tokens[row] == 2


def test_removing_what_is_unknown_is_no_error():
    batch = batch_of()
    assert batch.apply(step_of(removed=[12])).num_requests == 0


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (step_of(running=[(9, 1, 2, [])], scheduled=[1], step=4), ["step 4", "request 9"]),
        (step_of([new_request(0, [1], [0])], scheduled=[1]), ["request 0 is new"]),
        (step_of([new_request(5, [], [0])], scheduled=[1]), ["request 5 has 0 tokens"]),
        (step_of([new_request(5, [1] * 9, [0] * 3)], scheduled=[9]), ["9 tokens", "len=8"]),
        (step_of([new_request(5, [1, 2], [1])], scheduled=[3]), ["request 5", "2 tokens are"]),
        (step_of([new_request(5, [1] * 5, [1])], scheduled=[5]), ["blocks hold 4"]),
        (step_of([new_request(5, [1], [1, 2, 3])], scheduled=[1]), ["gets 3 blocks"]),
        (step_of([new_request(5, [1], [1])], scheduled=[0]), ["cannot compute 0 tokens"]),
        (step_of([new_request(5, [1], [1])], scheduled=[1, 1]), ["2 token counts"]),
        (
            step_of(
                [new_request(5, [1], [1]), new_request(6, [1], [2])],
                scheduled=[1, 1],
            ),
            ["request 6 is one more than max_num_seqs=2"],
        ),
        (
            step_of(running=[(0, -1, 1, []), (0, -1, 1, [])], scheduled=[1, 1]),
            ["scheduled twice"],
        ),
    ],
)
def test_step_that_does_not_fit_is_a_bug_that_names_the_request(output, names):
    batch = batch_of(max_seqs=2, max_len=8)
    batch.apply(step_of([new_request(0, [1, 2], [0])], scheduled=[1]))
    with pytest.raises(BatchStateError) as caught:
        batch.apply(output)
    assert caught.value.exit_status is ExitStatus.BUG
    for name in names:
        assert name in caught.value.message


def test_request_that_outgrows_the_context_is_named():
    batch = batch_of(max_seqs=2, max_len=4)
    batch.apply(
        step_of([new_request(0, [1] * 3, [0]), new_request(1, [1] * 4, [1])], scheduled=[3, 4])
    )
    with pytest.raises(BatchStateError, match="request 1 grows to 5"):
        batch.apply(step_of(running=[(0, 5, 3, []), (1, 5, 4, [])], scheduled=[1, 1]))
