"""Several requests through one runner with tokens that are given: no two runs can part.

Logits are kept by request and length of its context. They mean the same whatever the batch was, so
runs in other batches, on other devices, eager or in CUDA graphs can be compared.
"""

import itertools
from dataclasses import dataclass

import msgspec

from tests.support.logit_recorder import LogitRecorder
from tests.support.tiny_model import VOCAB_SIZE
from tests.support.worker_steps import StepDriver, kv_config
from vcli.runtime.messages import NOT_SAMPLED, OWN_SAMPLE
from vcli.runtime.worker.replies import PendingResult

NUM_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes before step `step`."""

    step: int
    num_prompt: int
    num_generated: int


#: 3, then 5, then 9 requests decode together; some end and others take their rows.
ARRIVALS = (
    Arrival(0, 3, 40),
    Arrival(0, 150, 12),
    Arrival(0, 17, 14),
    Arrival(8, 49, 10),
    Arrival(8, 5, 30),
    Arrival(10, 1, 8),
    Arrival(10, 16, 20),
    Arrival(10, 33, 6),
    Arrival(10, 64, 9),
    Arrival(16, 190, 12),
    Arrival(26, 6, 5),
)
#: Most tokens of a request in a step, from this step on. Later decodes stand beside prompts that
#: get one token a step and sample nothing.
CHUNKS = {0: 48, 24: 1}
#: The request that is preempted before this step, and starts again with all its tokens.
PREEMPTED = {18: 4}


def token_at(request: int, position: int) -> int:
    """Of a prompt, or what is fed whatever the model would choose."""
    return (37 * position + 101 * request + 11) % VOCAB_SIZE


class ForcedRun(LogitRecorder):
    """All of `ARRIVALS` on a runner without a KV cache yet; `logits` (V,) by request and length.

    With `is_late` the host tells the runner no token: they are on its device alone.
    """

    def __init__(self, runner, *, is_late=False) -> None:
        self.logits = {}
        self.replayed: list[int] = []
        """Requests in each step that was a graph."""
        self.prompts: list[int] = []
        """Tokens in each step that was graphs between attentions."""
        self._runner = runner
        self._is_late = is_late
        self._sequences = []
        self._driver = StepDriver(self._execute, num_blocks=NUM_BLOCKS)
        self.record_logits()
        runner.initialize_kv_cache(kv_config(NUM_BLOCKS))

    def together(self):
        """In batches, each request when it comes; gives the logits."""
        self._count_replays()
        for step in itertools.count():
            for request, arrival in enumerate(ARRIVALS):
                if arrival.step == step:
                    self._add(request)
            self._driver._chunk = CHUNKS.get(step, self._driver._chunk)
            if step in PREEMPTED:
                self._driver.preempt(self._sequences[PREEMPTED[step]])
            self._driver.step()
            if len(self._sequences) == len(ARRIVALS) and not self._driver.running:
                return self.logits

    def alone(self):
        """One request after the other, each prompt in one step; gives the logits."""
        for request in range(len(ARRIVALS)):
            self._add(request)
            self._driver.run()
        return self.logits

    def _add(self, request: int) -> None:
        arrival = ARRIVALS[request]
        prompt = [token_at(request, position) for position in range(arrival.num_prompt)]
        sequence = self._driver.add(prompt, max_tokens=arrival.num_generated)
        self._sequences.append(sequence)

    def _execute(self, output):
        if self._is_late:
            output = told_no_tokens(output)
        self.recorded.clear()
        result = self._runner.execute(output)
        if isinstance(result, PendingResult):
            result = result.resolve()
        places = [place for place, token in enumerate(result.token_ids) if token != NOT_SAMPLED]
        rows = self.recorded[0] if places else []
        assert len(rows) == len(places)
        numbers = [sequence.number for sequence in self._sequences]
        for row, place in zip(rows, places, strict=True):
            number = result.numbers[place]
            request = numbers.index(number)
            length = len(self._sequences[request].tokens)
            assert (request, length) not in self.logits
            self.logits[request, length] = row
            token = token_at(request, length)
            if self._is_late:
                self._force_on_device(number, result.token_ids[place], token)
            result.token_ids[place] = token
        return result

    def _force_on_device(self, number: int, sampled: int, token: int) -> None:
        last_token = self._runner._on_device.last_token
        row = self._runner._batch._row_of[number]
        assert int(last_token[row]) == sampled, f"row {row} kept another token than was sampled"
        last_token[row] = token

    def _count_replays(self) -> None:
        graphs = getattr(self._runner, "_graphs", None)
        if graphs is None:
            return
        prompts = self._runner._prompt_graphs
        replay, run = graphs.replay, prompts.run

        def counted(num_requests, *arguments):
            self.replayed.append(num_requests)
            return replay(num_requests, *arguments)

        def counted_prompts(inputs, *arguments):
            self.prompts.append(inputs.metadata.num_tokens)
            return run(inputs, *arguments)

        graphs.replay = counted
        prompts.run = counted_prompts


def told_no_tokens(output):
    """The step as a scheduler sends it that is ahead of the samples."""
    token_ids = [OWN_SAMPLE if token >= 0 else token for token in output.running.token_ids]
    running = msgspec.structs.replace(output.running, token_ids=token_ids)
    return msgspec.structs.replace(output, running=running, keeps_samples=True)


def assert_alike(found, expected, limit: float) -> None:
    """Logits of two runs, relative to their norm; names the request and length of the worst."""
    assert found.keys() == expected.keys()
    differences = {
        key: ((found[key] - logits).norm() / logits.norm()).item()
        for key, logits in expected.items()
    }
    # Written so that not-a-number is an error.
    wrong = {key: value for key, value in differences.items() if not value < limit}
    assert not wrong, f"{len(wrong)} of {len(differences)} (request, length) differ: {wrong}"
