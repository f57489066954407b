"""Whatever else runs, a request gets the tokens that it would get alone.

Random workloads drive the real scheduler against a worker that verifies every KV row it reads.
"""

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fake_model import VOCAB_SIZE, FakeModelWorker, generate_alone
from vcli.runtime.config import CacheConfig, SchedulerConfig
from vcli.runtime.core.scheduler import Scheduler
from vcli.runtime.messages import (
    OWN_SAMPLE,
    EngineRequest,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vcli.runtime.sampling_params import SamplingParams

MAX_MODEL_LEN = 48


@dataclass(frozen=True)
class Setting:
    seed: int
    num_requests: int
    block_size: int
    num_spare_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    has_chunked_prefill: bool
    has_prefix_cache: bool
    num_steps_in_flight: int
    abort_chance: float
    keeps_samples: bool = False
    num_stages: int = 1
    has_stop_tokens: bool = False


settings_of_runs = st.builds(
    Setting,
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 14),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    num_spare_blocks=st.integers(0, 20),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(1, 64),
    has_chunked_prefill=st.booleans(),
    has_prefix_cache=st.booleans(),
    num_steps_in_flight=st.integers(1, 3),
    abort_chance=st.sampled_from([0.0, 0.0, 0.1]),
    keeps_samples=st.booleans(),
    num_stages=st.integers(1, 3),
    has_stop_tokens=st.booleans(),
)


QUIET = Setting(
    seed=1,
    num_requests=1,
    block_size=4,
    num_spare_blocks=20,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    has_chunked_prefill=True,
    has_prefix_cache=True,
    num_steps_in_flight=1,
    abort_chance=0.0,
)


@dataclass
class Simulation:
    setting: Setting
    expected: dict[str, list[int]] = field(default_factory=dict)
    generated: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        setting = self.setting
        num_blocks = -(-MAX_MODEL_LEN // setting.block_size) + setting.num_spare_blocks
        kv = KVCacheConfig(num_blocks=num_blocks, block_size=setting.block_size)
        self.random = random.Random(setting.seed)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=setting.max_num_seqs,
                max_num_batched_tokens=setting.max_num_batched_tokens,
                enable_chunked_prefill=setting.has_chunked_prefill,
            ),
            CacheConfig(
                block_size=setting.block_size, enable_prefix_caching=setting.has_prefix_cache
            ),
            kv,
            MAX_MODEL_LEN,
            num_stages=setting.num_stages,
            keeps_samples=setting.keeps_samples,
        )
        self.worker = FakeModelWorker(
            kv,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
        )
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def run(self) -> None:
        waiting = [self.make_request(index) for index in range(self.setting.num_requests)]
        for _ in range(20_000):
            while waiting and self.random.random() < 0.4:
                request = waiting.pop()
                self.scheduler.add_request(request)
                self.generated[request.request_id] = []
            self.abort_some()
            is_idle = not self.advance()
            self.scheduler.check_integrity()
            if is_idle and not waiting:
                return
        raise AssertionError("the scheduler makes no progress")

    def make_request(self, index: int) -> EngineRequest:
        longest = MAX_MODEL_LEN - 1
        if not self.setting.has_chunked_prefill:
            longest = min(longest, self.setting.max_num_batched_tokens)
        # Few distinct beginnings, so that prefixes meet.
        base = self.random.choice([1, 2])
        length = self.random.randint(1, longest)
        prompt = [base + position % 3 for position in range(length)]
        if self.random.random() < 0.5:
            prompt[-1] = self.random.randint(0, 999)
        max_tokens = self.random.choice([1, 2, 7, 30, None])
        # Every twentieth token of the vocabulary: about every third request stops early.
        stops = tuple(range(0, VOCAB_SIZE, 20)) if self.setting.has_stop_tokens else ()
        min_tokens = self.random.choice([0, 0, 3]) if stops and (max_tokens or 9) > 3 else 0
        request = EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=max_tokens, stop_token_ids=stops, min_tokens=min_tokens
            ),
        )
        room = MAX_MODEL_LEN - length
        self.expected[request.request_id] = generate_alone(
            prompt, min(max_tokens or room, room), stops, min_tokens
        )
        return request

    def abort_some(self) -> None:
        for request_id in self.scheduler.unfinished_ids():
            if self.random.random() < self.setting.abort_chance:
                assert self.scheduler.abort([request_id]) == [request_id]
                self.aborted.add(request_id)

    def advance(self) -> bool:
        """Start a step if there is room, finish one if there is one; False: nothing to do."""
        out = None
        if len(self.in_flight) < self.setting.num_steps_in_flight:
            out = self.scheduler.schedule()
            if out is not None:
                # The workers run steps in order, long before the core takes the results.
                self.in_flight.append((out, self.worker.execute(out)))
        has_room = len(self.in_flight) < self.setting.num_steps_in_flight
        if out is not None and has_room and self.random.random() < 0.5:
            return True
        if not self.in_flight:
            assert not self.scheduler.has_unfinished, "unfinished, but nothing is scheduled"
            return False
        for output in self.scheduler.update_from_output(*self.in_flight.popleft()):
            assert output.request_id not in self.aborted
            assert output.request_id not in self.reasons
            self.generated[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        return True


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_runs)
def test_tokens_equal_those_of_running_alone(setting: Setting) -> None:
    simulation = Simulation(setting)

    simulation.run()

    for request_id, expected in simulation.expected.items():
        generated = simulation.generated[request_id]
        if request_id in simulation.aborted:
            assert generated == expected[: len(generated)]
        else:
            assert generated == expected
            stops = simulation.setting.has_stop_tokens and expected[-1] % 20 == 0
            allowed = {"stop", "length"} if stops else {"length"}
            assert simulation.reasons[request_id] in allowed
    stats = simulation.scheduler.stats()
    assert stats.num_free_kv_blocks == stats.num_kv_blocks
    assert stats.num_running == stats.num_waiting == 0


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_a_tiny_cache_forces_preemption_and_loses_nothing(has_prefix_cache: bool) -> None:
    setting = Setting(
        seed=7,
        num_requests=12,
        block_size=4,
        num_spare_blocks=2,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        has_chunked_prefill=True,
        has_prefix_cache=has_prefix_cache,
        num_steps_in_flight=1,
        abort_chance=0.0,
    )
    simulation = Simulation(setting)

    simulation.run()

    assert simulation.scheduler.stats().preemptions_total > 0
    assert simulation.generated == simulation.expected


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_a_tiny_cache_forces_preemption_of_requests_whose_token_is_in_flight(
    has_prefix_cache: bool,
) -> None:
    setting = Setting(
        seed=7,
        num_requests=12,
        block_size=4,
        num_spare_blocks=2,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        has_chunked_prefill=True,
        has_prefix_cache=has_prefix_cache,
        num_steps_in_flight=2,
        abort_chance=0.0,
        keeps_samples=True,
    )
    simulation = Simulation(setting)

    simulation.run()

    assert simulation.scheduler.stats().preemptions_total > 0
    assert simulation.generated == simulation.expected


def test_a_step_is_scheduled_while_the_token_that_it_needs_is_in_flight() -> None:
    simulation = Simulation(replace(QUIET, keeps_samples=True))
    simulation.scheduler.add_request(
        EngineRequest(request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams())
    )

    first = simulation.scheduler.schedule()
    second = simulation.scheduler.schedule()

    assert first is not None
    assert second is not None
    assert second.running.token_ids == [OWN_SAMPLE]
    assert second.num_scheduled_tokens == [1]


def test_nothing_is_scheduled_behind_the_last_token_that_a_request_may_have() -> None:
    simulation = Simulation(replace(QUIET, keeps_samples=True))
    simulation.scheduler.add_request(
        EngineRequest(
            request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=2)
        )
    )

    outs = [simulation.scheduler.schedule() for _ in range(3)]

    assert [out is not None for out in outs] == [True, True, False]


def test_steps_of_a_pipeline_share_the_running_requests() -> None:
    simulation = Simulation(replace(QUIET, num_stages=2, num_steps_in_flight=2))
    for index in range(4):
        simulation.scheduler.add_request(
            EngineRequest(
                request_id=f"r{index}", prompt_token_ids=[index + 1], sampling=SamplingParams()
            )
        )
    simulation.advance()
    while simulation.in_flight:
        simulation.scheduler.update_from_output(*simulation.in_flight.popleft())

    sizes = []
    for _ in range(2):
        out = simulation.scheduler.schedule()
        assert out is not None
        sizes.append(len(out.running.numbers))

    assert sizes == [2, 2]
    assert simulation.scheduler.schedule() is None
