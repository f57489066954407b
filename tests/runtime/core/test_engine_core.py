"""KV start-up order, steps, and requests that come and go while a step is in flight."""

from collections.abc import Iterator

import pytest

from tests.support.fake_executor import FakeExecutor, fake_engine_config
from tests.support.fake_model import VOCAB_SIZE, generate_alone
from vcli.runtime.core.engine_core import EngineCore
from vcli.runtime.errors import RequestError
from vcli.runtime.messages import EngineRequest, KVCacheConfig, SchedulerOutput
from vcli.runtime.sampling_params import SamplingParams
from vcli.topology.errors import ConfigError


def request(request_id: str, prompt: list[int], **sampling) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 5, **sampling}),
    )


@pytest.fixture
def executor() -> Iterator[FakeExecutor]:
    executor = FakeExecutor(fake_engine_config(), on_message=lambda message: None)
    executor.start()
    yield executor
    executor.shutdown()


@pytest.fixture
def engine(executor: FakeExecutor) -> EngineCore:
    return EngineCore(fake_engine_config(), executor)


def run_to_end(engine: EngineCore) -> dict[str, list[int]]:
    generated: dict[str, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            generated.setdefault(output.request_id, []).extend(output.new_token_ids)
    return generated


def test_kv_cache_is_measured_then_allocated_then_warmed_up(
    engine: EngineCore, executor: FakeExecutor
) -> None:
    assert executor.calls == [
        "start",
        "determine_available_memory",
        "kv_bytes_per_block",
        "initialize_from_config",
        "compile_or_warm_up_model",
    ]
    assert engine.kv_config == KVCacheConfig(num_blocks=64, block_size=4)


def test_too_little_memory_is_refused_before_anything_is_allocated() -> None:
    config = fake_engine_config(num_kv_blocks=15)  # 60 tokens, max_model_len is 64
    executor = FakeExecutor(config, on_message=lambda message: None)
    executor.start()

    with pytest.raises(ConfigError) as caught:
        EngineCore(config, executor)

    assert "--kv-cache-memory" in caught.value.hint
    assert "initialize_from_config" not in executor.calls
    executor.shutdown()


def test_steps_give_the_tokens_of_all_requests(engine: EngineCore) -> None:
    engine.add_request(request("a", [1, 2, 3]))
    engine.add_request(request("b", [4] * 50, max_tokens=9))

    generated = run_to_end(engine)

    assert generated == {
        "a": generate_alone([1, 2, 3], 5),
        "b": generate_alone([4] * 50, 9),
    }


def test_step_without_requests_does_nothing(engine: EngineCore, executor: FakeExecutor) -> None:
    assert engine.step() == []
    assert "execute_model" not in executor.calls


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
def test_token_outside_the_vocabulary_is_refused(engine: EngineCore, token_id: int) -> None:
    with pytest.raises(RequestError, match=str(token_id)):
        engine.add_request(request("a", [1, token_id, 3]))

    assert not engine.has_unfinished


def test_sampling_option_out_of_range_is_refused(engine: EngineCore) -> None:
    with pytest.raises(RequestError, match="temperature"):
        engine.add_request(request("a", [1], temperature=-1.0))


def test_abort_while_a_step_is_in_flight_frees_blocks_and_drops_its_token(
    engine: EngineCore, executor: FakeExecutor
) -> None:
    executor.gate.clear()
    engine.add_request(request("a", [1, 2, 3]))
    engine.add_request(request("b", [4, 5, 6]))
    future = engine.start_step()

    assert engine.abort_requests(["a", "unknown"]) == ["a"]

    stats = engine.scheduler.stats()
    assert stats.num_kv_blocks - stats.num_free_kv_blocks == 1
    assert future is not None
    assert not future.done()
    executor.gate.set()
    assert [output.request_id for output in engine.finish_step()] == ["b"]
    assert run_to_end(engine)["b"] == generate_alone([4, 5, 6], 5)[1:]


def test_request_that_arrives_while_a_step_is_in_flight_joins_the_next_one(
    engine: EngineCore,
) -> None:
    engine.add_request(request("a", [1, 2, 3]))
    engine.start_step()
    engine.add_request(request("b", [4, 5, 6]))
    assert engine.start_step() is None

    first = engine.finish_step()
    second = engine.step()

    assert [output.request_id for output in first] == ["a"]
    assert {output.request_id for output in second} == {"a", "b"}


class OverlappingExecutor(FakeExecutor):
    can_overlap_steps = True


@pytest.fixture
def overlapping() -> Iterator[FakeExecutor]:
    executor = OverlappingExecutor(fake_engine_config(), on_message=lambda message: None)
    executor.start()
    yield executor
    executor.shutdown()


def test_steps_in_flight_at_once_give_the_same_tokens(overlapping: FakeExecutor) -> None:
    engine = EngineCore(fake_engine_config(), overlapping)
    assert engine.overlap.keeps_samples
    prompts = {f"r{index}": [index + 1] * (20 + index) for index in range(6)}
    for request_id, prompt in prompts.items():
        engine.add_request(request(request_id, prompt))

    generated = run_to_end(engine)

    assert generated == {name: generate_alone(prompt, 5) for name, prompt in prompts.items()}


def test_result_none_is_followed_by_sampling() -> None:
    config = fake_engine_config()

    class DeferringExecutor(FakeExecutor):
        def _step_result(self, out: SchedulerOutput) -> object:
            self.held = super()._step_result(out)
            return None

        def sample_tokens(self, grammar, *, non_block=False):
            assert grammar is None
            return self.held

    executor = DeferringExecutor(config, on_message=lambda message: None)
    executor.start()
    engine = EngineCore(config, executor)
    engine.add_request(request("a", [1, 2, 3]))

    assert run_to_end(engine)["a"] == generate_alone([1, 2, 3], 5)
    executor.shutdown()
