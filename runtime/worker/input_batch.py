"""The persistent batch of one rank: a row for each request that the scheduler has running.

Rows stay where they are while a request lives; a step names the rows it uses, in batch order. All
ranks apply the same scheduler output, so all of them hold the same rows. Nothing here is a tensor.

    number -> row     token_ids[row]  = prompt, generated ...   (num_tokens[row] known)
                      block_table[row] = block ids               (num_blocks[row] of them)
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vcli.runtime.messages import (
    NOT_SAMPLED,
    OWN_SAMPLE,
    NewRequestData,
    RunningRequests,
    SchedulerOutput,
)
from vcli.runtime.worker.sampling_columns import SamplingColumns
from vcli.topology.errors import VcliError

IntArray = npt.NDArray[np.int32]

_INITIAL_TOKENS = 256


class BatchStateError(VcliError):
    """The scheduler's view of a request and the worker's differ: a bug of ours (exit 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRows:
    """One step in batch order. Arrays have one entry for each request of the step."""

    step: int
    numbers: list[int]
    rows: npt.NDArray[np.intp]
    num_scheduled: IntArray
    num_computed: IntArray
    """Tokens in the KV cache before this step."""
    samples: npt.NDArray[np.bool_]
    """Whether the request's last known token is computed in this step."""
    is_own: npt.NDArray[np.bool_]
    """Whether that token is one that this worker sampled, and may have on its device alone."""

    @property
    def num_requests(self) -> int:
        """Requests in this step."""
        return len(self.numbers)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model in this step."""
        return int(self.num_scheduled.sum())

    @property
    def seq_lens(self) -> IntArray:
        """Context of each request, this step's tokens included."""
        return self.num_computed + self.num_scheduled


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Block ids that a row got in a step, from its column `start` on."""

    row: int
    start: int
    block_ids: list[int]


class InputBatch:
    """At most `max_num_seqs` requests of at most `max_model_len` tokens.

    With `has_late_samples`, a step may go on from a token that only the device knows: its cell in
    `token_ids` means nothing, unless `fill_samples` is told the token.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        has_late_samples: bool = False,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        columns = min(_INITIAL_TOKENS, max_model_len)
        self.token_ids: IntArray = np.zeros((max_num_seqs, columns), dtype=np.int32)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_table: IntArray = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.sampling = SamplingColumns(max_num_seqs)
        self.new_rows: list[int] = []
        """Rows that got a request in the last step."""
        self.new_blocks: list[NewBlocks] = []
        """What the rows of the last step got."""
        self._has_late_samples = has_late_samples
        self._own_samples: IntArray = np.full(max_num_seqs, NOT_SAMPLED, dtype=np.int32)
        self._row_of: dict[int, int] = {}
        # A stack: the lowest rows are used first, which keeps the rows of a step close together.
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def numbers(self) -> list[int]:
        """Request numbers that have a row."""
        return list(self._row_of)

    def apply(self, output: SchedulerOutput) -> ScheduledRows:
        """Take over the changes that `output` carries and give the rows of its step.

        Raises:
            BatchStateError: `output` does not fit what this batch knows.
        """
        self.new_blocks = []
        for number in output.removed:
            self._remove(number)
        self.new_rows = [self._add(request, output.step) for request in output.new]
        running_rows = self._append(output.running, output.step)
        return self._schedule(output, running_rows)

    def keep_samples(self, step: ScheduledRows, token_ids: list[int]) -> None:
        """Note what the sampling requests of `step` got, for when they are told `OWN_SAMPLE`."""
        self._own_samples[step.rows[step.samples]] = token_ids

    def fill_samples(self, step: ScheduledRows, token_ids: npt.NDArray[np.int64]) -> None:
        """Take what the sampling requests of `step` got, where they are still here."""
        chosen = np.flatnonzero(step.samples)
        rows, positions = step.rows[chosen], step.seq_lens[chosen]
        row_of = self._row_of
        stays = np.fromiter(
            (
                row_of.get(step.numbers[place]) == row
                for place, row in zip(chosen.tolist(), rows.tolist(), strict=True)
            ),
            dtype=np.bool_,
            count=len(chosen),
        )
        # The last token that a request may have ends it: it has no cell.
        stays &= positions < self.max_model_len
        if not stays.any():
            return
        self._grow_tokens(int(positions[stays].max()) + 1)
        self.token_ids[rows[stays], positions[stays]] = token_ids[stays]

    def _remove(self, number: int) -> None:
        # A request may be removed twice (preempted, then aborted while it waits), or before it
        # ever ran; both leave nothing to forget.
        row = self._row_of.pop(number, None)
        if row is None:
            return
        self.num_tokens[row] = 0
        self.num_blocks[row] = 0
        self._own_samples[row] = NOT_SAMPLED
        self.sampling.clear_row(row)
        self._free_rows.append(row)

    def _add(self, request: NewRequestData, step: int) -> int:
        number, num_tokens = request.number, len(request.token_ids)
        if number in self._row_of:
            raise BatchStateError(f"step {step}: request {number} is new, but has a row already")
        if not self._free_rows:
            raise BatchStateError(
                f"step {step}: request {number} is one more than max_num_seqs={self.max_num_seqs}"
            )
        if not 0 < num_tokens <= self.max_model_len:
            raise BatchStateError(
                f"step {step}: request {number} has {num_tokens} tokens, "
                f"max_model_len={self.max_model_len}"
            )
        row = self._free_rows.pop()
        self._row_of[number] = row
        self._grow_tokens(num_tokens)
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self._append_blocks(row, request.block_ids, number, step)
        self.sampling.set_row(
            row,
            request.sampling,
            request.eos_token_ids,
            num_generated=num_tokens - request.num_prompt_tokens,
        )
        return row

    def _append(self, running: RunningRequests, step: int) -> list[int]:
        try:
            rows = [self._row_of[number] for number in running.numbers]
        except KeyError as error:
            raise BatchStateError(
                f"step {step}: request {error.args[0]} is scheduled as running, "
                f"but this worker has no row for it"
            ) from None
        lengths = {
            len(column)
            for column in (running.token_ids, running.num_computed_tokens, running.new_block_ids)
        }
        if lengths != {len(rows)}:
            raise BatchStateError(f"step {step}: the columns of the running requests differ")
        if not rows:
            return rows
        token_ids = np.asarray(running.token_ids, dtype=np.int32)
        row_array = np.asarray(rows, dtype=np.intp)
        own = token_ids == OWN_SAMPLE
        if own.any() and not self._has_late_samples:
            self._insert_own_samples(token_ids, own, row_array, running.numbers, step)
        sampled = (token_ids >= 0) | own
        sampled_rows = row_array[sampled]
        if sampled_rows.size:
            positions = self.num_tokens[sampled_rows]
            longest = int(positions.max()) + 1
            if longest > self.max_model_len:
                number = running.numbers[int(np.flatnonzero(sampled)[positions.argmax()])]
                raise BatchStateError(
                    f"step {step}: request {number} grows to {longest} tokens, "
                    f"max_model_len={self.max_model_len}"
                )
            self._grow_tokens(longest)
            known = token_ids >= 0
            known_rows = row_array[known]
            self.token_ids[known_rows, self.num_tokens[known_rows]] = token_ids[known]
            self.num_tokens[sampled_rows] += 1
        for index, block_ids in enumerate(running.new_block_ids):
            if block_ids:
                self._append_blocks(rows[index], block_ids, running.numbers[index], step)
        return rows

    def _insert_own_samples(
        self,
        token_ids: IntArray,
        own: npt.NDArray[np.bool_],
        rows: npt.NDArray[np.intp],
        numbers: list[int],
        step: int,
    ) -> None:
        kept = self._own_samples[rows[own]]
        if (kept == NOT_SAMPLED).any():
            number = numbers[int(np.flatnonzero(own)[int((kept == NOT_SAMPLED).argmax())])]
            raise BatchStateError(
                f"step {step}: request {number} goes on with a token that this worker did not keep"
            )
        token_ids[own] = kept
        self._own_samples[rows[own]] = NOT_SAMPLED

    def _append_blocks(self, row: int, block_ids: list[int], number: int, step: int) -> None:
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        if end > self.block_table.shape[1]:
            raise BatchStateError(
                f"step {step}: request {number} gets {end} blocks, "
                f"{self.block_table.shape[1]} hold max_model_len={self.max_model_len}"
            )
        self.block_table[row, start:end] = block_ids
        self.num_blocks[row] = end
        self.new_blocks.append(NewBlocks(row, start, block_ids))

    def _grow_tokens(self, num_tokens: int) -> None:
        columns = self.token_ids.shape[1]
        if num_tokens <= columns:
            return
        wider = min(max(num_tokens, 2 * columns), self.max_model_len)
        grown: IntArray = np.zeros((self.max_num_seqs, wider), dtype=np.int32)
        grown[:, :columns] = self.token_ids
        self.token_ids = grown

    def _schedule(self, output: SchedulerOutput, running_rows: list[int]) -> ScheduledRows:
        numbers = [request.number for request in output.new] + output.running.numbers
        if len(output.num_scheduled_tokens) != len(numbers):
            raise BatchStateError(
                f"step {output.step}: {len(output.num_scheduled_tokens)} token counts for "
                f"{len(numbers)} requests"
            )
        rows = np.asarray(self.new_rows + running_rows, dtype=np.intp)
        num_scheduled: IntArray = np.asarray(output.num_scheduled_tokens, dtype=np.int32)
        num_computed: IntArray = np.asarray(
            [request.num_computed_tokens for request in output.new]
            + output.running.num_computed_tokens,
            dtype=np.int32,
        )
        ends = num_computed + num_scheduled
        known = self.num_tokens[rows]
        room = self.num_blocks[rows] * self.block_size
        wrong = (num_scheduled < 1) | (num_computed < 0) | (ends > known) | (ends > room)
        if wrong.any():
            index = int(np.flatnonzero(wrong)[0])
            raise BatchStateError(
                f"step {output.step}: request {numbers[index]} cannot compute "
                f"{num_scheduled[index]} tokens after {num_computed[index]}: "
                f"{known[index]} tokens are known, its blocks hold {room[index]}"
            )
        if len(set(numbers)) != len(numbers):
            raise BatchStateError(f"step {output.step}: a request is scheduled twice")
        return ScheduledRows(
            step=output.step,
            numbers=numbers,
            rows=rows,
            num_scheduled=num_scheduled,
            num_computed=num_computed,
            samples=ends == known,
            is_own=np.asarray(
                [NOT_SAMPLED] * len(output.new) + output.running.token_ids, dtype=np.int32
            )
            == OWN_SAMPLE,
        )
