"""Steps prepared ahead change no token: a real tiny model, with and without, on every shape."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import BLOCK_SIZE, engine_config
from vcli.runtime.config import CacheConfig, EngineConfig, SchedulerConfig
from vcli.runtime.core.engine_core import EngineCore
from vcli.runtime.core.overlap import decide_overlap
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.executor.base import Executor
from vcli.runtime.executor.uniproc import UniProcExecutor
from vcli.runtime.messages import EngineRequest
from vcli.runtime.sampling_params import SamplingParams
from vcli.topology.config import ParallelConfig
from vcli.topology.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SHARED = [17, 18, 19, 20] * 6
REQUESTS = {
    "greedy": ([5, 6, 7, 8, 9, 10, 11], GREEDY),
    "seeded": ([300], SamplingParams(seed=4, max_tokens=12)),
    "seeded top-k": (SHARED, SamplingParams(seed=5, top_k=30, max_tokens=9)),
    "prefix hit": ([*SHARED, 3, 4], SamplingParams(temperature=0.0, max_tokens=15)),
    "penalties": (
        [40, 41, 42],
        SamplingParams(
            temperature=0.0, max_tokens=12, frequency_penalty=1.5, repetition_penalty=1.3
        ),
    ),
    "logprobs": ([9] * 5, SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)),
    "one token": ([1, 2], SamplingParams(temperature=0.0, max_tokens=1)),
    "min tokens": ([8, 9], SamplingParams(temperature=0.0, max_tokens=8, min_tokens=4)),
}
TINY_CACHE = 64 * BLOCK_SIZE * 2 * 4 * 4 * 8 * 4
"""64 blocks: as many as one request of the longest kind may need."""


def tiny_config(parallel: ParallelConfig | None = None, **scheduler) -> EngineConfig:
    config = engine_config(
        tiny_checkpoint(),
        parallel=parallel,
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_memory_bytes=TINY_CACHE),
    )
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 512, **scheduler}
    return replace(config, scheduler=SchedulerConfig(**limits))


@pytest.fixture(scope="module")
def executor() -> Iterator[UniProcExecutor]:
    executor = UniProcExecutor(tiny_config(), on_message=lambda _: None)
    executor.start()
    yield executor
    executor.shutdown()


def drain(engine: EngineCore) -> None:
    """The workers are told nothing of a new engine, so nothing of the old one may be left."""
    while engine.oldest_step is not None:
        engine.finish_step()
    engine.scheduler.check_integrity()


def run(engine: EngineCore, requests, abort_after: dict[str, int] | None = None):
    """Tokens, finish reason and log-probabilities of each request."""
    for request_id, (prompt, sampling) in requests.items():
        engine.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling=sampling,
                eos_token_ids=(2,),
            )
        )
    results = {request_id: ([], [], []) for request_id in requests}
    while engine.has_unfinished:
        for output in engine.step():
            tokens, reasons, logprobs = results[output.request_id]
            tokens += output.new_token_ids
            logprobs += [entry.token_id for entry in output.logprobs or ()]
            if output.finish_reason is not None:
                reasons.append((output.finish_reason, output.stop_token_id))
            elif len(tokens) == (abort_after or {}).get(output.request_id):
                assert engine.abort_requests([output.request_id]) == [output.request_id]
    drain(engine)
    return results


def results_of(executor: Executor, requests, *, is_async: bool, abort_after=None, **scheduler):
    config = tiny_config(async_scheduling=is_async, **scheduler)
    engine = EngineCore(config, executor)
    assert engine.overlap.keeps_samples is is_async
    results = run(engine, requests, abort_after)
    return results, engine.scheduler.stats()


@pytest.mark.parametrize("max_num_batched_tokens", [512, 16], ids=["whole", "chunked"])
def test_tokens_are_equal_with_and_without(executor, max_num_batched_tokens) -> None:
    limits = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 8}
    expected, _ = results_of(executor, REQUESTS, is_async=False, **limits)
    engine = EngineCore(tiny_config(async_scheduling=True, **limits), executor)

    results = run(engine, REQUESTS)
    again = run(engine, REQUESTS)

    assert results == expected
    assert again == expected
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_hit_tokens_total > 0
    assert stats.num_free_kv_blocks == stats.num_kv_blocks


def test_stop_token_ends_a_request_though_its_next_step_is_in_flight(executor) -> None:
    plain, _ = results_of(executor, REQUESTS, is_async=False)
    requests = {
        name: (prompt, msgspec.structs.replace(sampling, stop_token_ids=(plain[name][0][3],)))
        for name, (prompt, sampling) in REQUESTS.items()
        if name in ("greedy", "seeded", "prefix hit")
    }
    expected, _ = results_of(executor, requests, is_async=False)
    assert any(reasons[0][0] == "stop" for _, reasons, _ in expected.values())

    results, stats = results_of(executor, requests, is_async=True)

    assert results == expected
    assert stats.num_free_kv_blocks == stats.num_kv_blocks


def test_aborted_requests_leave_the_others_as_they_were(executor) -> None:
    expected, _ = results_of(executor, REQUESTS, is_async=False)

    results, _ = results_of(
        executor, REQUESTS, is_async=True, abort_after={"greedy": 3, "prefix hit": 1}
    )

    for name in REQUESTS:
        length = {"greedy": 3, "prefix hit": 1}.get(name)
        assert results[name][0] == expected[name][0][:length], name


def test_preempted_requests_go_on_with_the_tokens_that_they_would_have_had(executor) -> None:
    requests = {
        f"{index}": (
            [index + 3] * 30,
            SamplingParams(temperature=0.0, max_tokens=60)
            if index % 2
            else SamplingParams(seed=index, max_tokens=60),
        )
        for index in range(5)
    }
    expected, _ = results_of(executor, requests, is_async=False)

    results, stats = results_of(executor, requests, is_async=True)

    assert stats.preemptions_total > 0
    assert results == expected


def test_step_whose_sampling_is_deferred_is_sampled_before_the_next_one_starts(
    executor, monkeypatch
) -> None:
    expected, _ = results_of(executor, REQUESTS, is_async=False)
    engine = EngineCore(tiny_config(async_scheduling=True), executor)
    schedule = engine.scheduler.schedule
    sampled = []
    sample_tokens = executor.sample_tokens

    def schedule_deferred():
        out = schedule()
        return out and msgspec.structs.replace(out, defer_sampling=out.step % 2 == 0)

    def counted(grammar):
        sampled.append(grammar)
        return sample_tokens(grammar)

    monkeypatch.setattr(engine.scheduler, "schedule", schedule_deferred)
    monkeypatch.setattr(executor, "sample_tokens", counted)

    assert run(engine, REQUESTS) == expected
    assert len(sampled) > 5


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "tp", "pp", "is_async"),
    [
        ("mp", 2, 1, True),
        ("mp", 1, 2, False),
        ("colocated", 2, 1, True),
    ],
)
def test_ranks_in_processes_give_the_same_tokens(executor, backend, tp, pp, is_async) -> None:
    expected, _ = results_of(executor, REQUESTS, is_async=False)
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        distributed_executor_backend=backend,
    )
    config = tiny_config(parallel)
    ranks = get_executor_class(config.plan.backend.value)(config, on_message=lambda _: None)
    try:
        ranks.start()
        engine = EngineCore(config, ranks)
        assert engine.overlap.keeps_samples is is_async
        assert engine.overlap.num_steps == 2
        assert run(engine, REQUESTS) == expected
    finally:
        ranks.shutdown()


def test_what_was_asked_for_and_is_impossible_is_refused_with_the_reason() -> None:
    config = tiny_config(ParallelConfig(pipeline_parallel_size=2), async_scheduling=True)
    with pytest.raises(ConfigError, match="pipeline stages") as refused:
        decide_overlap(config, backend_can_overlap=True)
    assert refused.value.hint == "--no-async-scheduling"
    with pytest.raises(ConfigError, match="one step at a time"):
        decide_overlap(tiny_config(async_scheduling=True), backend_can_overlap=False)


def test_pipeline_has_a_step_in_each_stage() -> None:
    config = tiny_config(ParallelConfig(pipeline_parallel_size=3, pp_layer_partition=(2, 1, 1)))
    overlap = decide_overlap(config, backend_can_overlap=True)
    assert (overlap.num_steps, overlap.num_stages, overlap.keeps_samples) == (3, 3, False)
