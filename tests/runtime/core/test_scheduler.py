"""Single decisions of the scheduler: order, budget, chunks, preemption, ends, counters."""

from typing import Any

import pytest

from vcli.runtime.config import CacheConfig, SchedulerConfig
from vcli.runtime.core.scheduler import Scheduler
from vcli.runtime.errors import RequestError
from vcli.runtime.messages import (
    EngineOutput,
    EngineRequest,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from vcli.runtime.sampling_params import SamplingParams

EOS = 99


def make_scheduler(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    max_model_len: int = 64,
    has_prefix_cache: bool = False,
    **limits: Any,
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits}),
        CacheConfig(block_size=block_size, enable_prefix_caching=has_prefix_cache),
        KVCacheConfig(num_blocks=num_blocks, block_size=block_size),
        max_model_len,
    )


def request(request_id: str, prompt: list[int] | int, **sampling: Any) -> EngineRequest:
    prompt_token_ids = [1] * prompt if isinstance(prompt, int) else prompt
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(**sampling),
        eos_token_ids=(EOS,),
    )


def must_schedule(scheduler: Scheduler) -> SchedulerOutput:
    out = scheduler.schedule()
    assert out is not None
    return out


def result_of(out: SchedulerOutput, *token_ids: int) -> ModelRunnerOutput:
    numbers = [data.number for data in out.new] + out.running.numbers
    return ModelRunnerOutput(step=out.step, numbers=numbers, token_ids=list(token_ids))


def step(scheduler: Scheduler, *token_ids: int) -> list[EngineOutput]:
    out = must_schedule(scheduler)
    return scheduler.update_from_output(out, result_of(out, *token_ids))


def test_nothing_to_do_gives_no_step() -> None:
    assert make_scheduler().schedule() is None


def test_waiting_requests_start_in_order_of_arrival_after_the_running_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(request("a", 6))
    scheduler.add_request(request("b", 6))
    first = must_schedule(scheduler)
    assert [data.number for data in first.new] == [0, 1]
    assert first.num_scheduled_tokens == [6, 4]

    scheduler.update_from_output(first, result_of(first, 5, -1))
    scheduler.add_request(request("c", 3))
    second = must_schedule(scheduler)

    assert [data.number for data in second.new] == [2]
    assert second.running.numbers == [0, 1]
    assert second.running.token_ids == [5, -1]
    assert second.running.num_computed_tokens == [6, 4]
    assert second.num_scheduled_tokens == [3, 1, 2]


def test_new_blocks_are_told_only_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 4))
    first = must_schedule(scheduler)
    scheduler.update_from_output(first, result_of(first, 5))
    second = must_schedule(scheduler)
    scheduler.update_from_output(second, result_of(second, 5))
    third = must_schedule(scheduler)

    assert len(first.new[0].block_ids) == 1
    assert [len(ids) for ids in second.running.new_block_ids] == [1]
    assert third.running.new_block_ids == [[]]


def test_max_num_seqs_limits_the_running_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(request(name, 2, max_tokens=1))

    assert [output.request_id for output in step(scheduler, 5, 5)] == ["a", "b"]
    assert [output.request_id for output in step(scheduler, 5)] == ["c"]


def test_more_sequences_than_tokens_in_a_step_starve_nobody() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=2)
    for name in "abc":
        scheduler.add_request(request(name, 1, max_tokens=3))

    ended = []
    while scheduler.has_unfinished:
        out = must_schedule(scheduler)
        tokens = [5] * len(out.num_scheduled_tokens)
        outputs = scheduler.update_from_output(out, result_of(out, *tokens))
        ended += [output.request_id for output in outputs if output.finish_reason]
    assert ended == ["a", "b", "c"]


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, enable_chunked_prefill=False)
    scheduler.add_request(request("a", 6, max_tokens=1))
    scheduler.add_request(request("b", 6, max_tokens=1))

    assert must_schedule(scheduler).num_scheduled_tokens == [6]
    assert must_schedule(scheduler).num_scheduled_tokens == [6]


def test_without_chunked_prefill_a_prompt_above_the_budget_is_refused() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, enable_chunked_prefill=False)

    with pytest.raises(RequestError, match="11 tokens") as caught:
        scheduler.add_request(request("a", 11))

    assert "--max-num-batched-tokens" in caught.value.hint
    assert not scheduler.has_unfinished


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "no tokens"),
        (64, {}, "64 tokens"),
        (3, {"top_p": 0.0}, "top_p"),
    ],
)
def test_request_that_can_never_run_is_refused(
    prompt: list[int] | int, sampling: dict[str, Any], said: str
) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match=said):
        scheduler.add_request(request("a", prompt, **sampling))
    assert not scheduler.has_unfinished


def test_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3, max_tokens=1))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add_request(request("a", 3))
    step(scheduler, 5)

    scheduler.add_request(request("a", 3))


def test_request_that_arrived_last_gives_way_and_is_the_first_to_resume() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    scheduler.add_request(request("a", 7))
    scheduler.add_request(request("b", 3))
    step(scheduler, 5, 6)
    scheduler.add_request(request("c", 2))
    # a: 8 tokens in 2 blocks, b: 4 tokens in 1; c takes none of the last block, it is headroom.
    assert scheduler.stats().num_waiting == 1
    step(scheduler, 5, 6)  # a and b fill their blocks up
    out = must_schedule(scheduler)  # a takes the last block, b finds none

    assert out.running.numbers == [0]
    assert out.new == []
    assert out.removed == [1]
    stats = scheduler.stats()
    assert (stats.preemptions_total, stats.num_running, stats.num_waiting) == (1, 1, 2)

    scheduler.update_from_output(out, result_of(out, 5))
    scheduler.abort(["a"])
    resumed = must_schedule(scheduler)

    assert resumed.removed == [0]
    assert [data.number for data in resumed.new] == [2, 3]
    assert resumed.new[0].token_ids == [1, 1, 1, 6, 6]
    assert resumed.new[0].num_prompt_tokens == 3
    scheduler.check_integrity()


def test_resumed_request_gets_its_prefix_back_from_the_cache() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_model_len=20, has_prefix_cache=True)
    scheduler.add_request(request("a", [2] * 11))
    scheduler.add_request(request("b", [3] * 7))
    step(scheduler, 5, 6)
    step(scheduler, 5, 6)  # a and b have filled 3 and 2 blocks
    out = must_schedule(scheduler)  # a takes the last one, b finds none
    assert out.removed == [1]
    scheduler.update_from_output(out, result_of(out, 5))
    scheduler.abort(["a"])

    resumed = must_schedule(scheduler)

    assert resumed.new[0].token_ids == [3] * 7 + [6, 6]
    assert resumed.new[0].num_computed_tokens == 8
    assert resumed.num_scheduled_tokens == [1]


def test_late_result_of_a_preempted_request_is_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 8))
    scheduler.add_request(request("b", 3))
    first = must_schedule(scheduler)
    scheduler.update_from_output(first, result_of(first, 5, 6))
    second = must_schedule(scheduler)
    late = result_of(second, 5, 6)
    scheduler._preempt(scheduler._running.pop())  # while its token is in flight

    outputs = scheduler.update_from_output(second, late)

    assert [output.request_id for output in outputs] == ["a"]
    resumed = must_schedule(scheduler)
    assert resumed.new[0].number == 2
    assert resumed.new[0].token_ids == [1, 1, 1, 6]


def test_abort_frees_blocks_at_once_in_every_state() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(request("running", 9))
    scheduler.add_request(request("waiting", 9))
    must_schedule(scheduler)

    assert scheduler.abort(["waiting", "running", "running", "unknown"]) == [
        "waiting",
        "running",
    ]

    stats = scheduler.stats()
    assert stats.num_free_kv_blocks == stats.num_kv_blocks
    assert not scheduler.has_unfinished
    scheduler.check_integrity()


def test_removed_requests_are_told_with_the_next_step_only_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3, max_tokens=1))
    step(scheduler, 5)
    assert scheduler.schedule() is None
    scheduler.add_request(request("b", 3))

    out = must_schedule(scheduler)
    scheduler.update_from_output(out, result_of(out, 5))

    assert out.removed == [0]
    assert must_schedule(scheduler).removed == []


def test_number_is_never_used_twice() -> None:
    scheduler = make_scheduler()
    for expected in range(3):
        scheduler.add_request(request("a", 3))
        assert must_schedule(scheduler).new[0].number == expected
        scheduler.abort(["a"])


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "stop_token_id"),
    [
        ({}, [5, EOS], "stop", EOS),
        ({"ignore_eos": True, "max_tokens": 2}, [EOS, EOS], "length", None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [5, EOS], "stop", EOS),
        ({"stop_token_ids": (7, 8)}, [5, 8], "stop", 8),
        ({"min_tokens": 2}, [EOS, EOS], "stop", EOS),
        ({"min_tokens": 3, "stop_token_ids": (7,)}, [7, EOS, 7], "stop", 7),
        ({"max_tokens": 3}, [5, 5, 5], "length", None),
        ({"max_tokens": 2}, [5, EOS], "stop", EOS),
        ({"max_tokens": 500}, [5, 5, 5, 5], "length", None),
        ({}, [5, 5, 5, 5], "length", None),
    ],
)
def test_request_ends_at_its_first_reason(
    sampling: dict[str, Any], tokens: list[int], reason: str, stop_token_id: int | None
) -> None:
    scheduler = make_scheduler(max_model_len=10)
    scheduler.add_request(request("a", 6, **{"max_tokens": None, **sampling}))

    outputs = [step(scheduler, token)[0] for token in tokens]

    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(tokens) - 1)
    assert outputs[-1].finish_reason == reason
    assert outputs[-1].stop_token_id == stop_token_id
    assert outputs[-1].new_token_ids == tokens[-1:]
    assert scheduler.stats().num_free_kv_blocks == scheduler.stats().num_kv_blocks


def test_logprobs_go_to_the_request_that_they_belong_to() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    scheduler.add_request(request("b", 3, logprobs=0))
    out = must_schedule(scheduler)
    logprobs = TokenLogprobs(6, -0.5, [], [])
    result = ModelRunnerOutput(
        step=out.step, numbers=[0, 1], token_ids=[5, 6], logprobs=[None, logprobs]
    )

    outputs = scheduler.update_from_output(out, result)

    assert [output.logprobs for output in outputs] == [None, [logprobs]]


@pytest.mark.parametrize(
    "result",
    [
        ModelRunnerOutput(step=1, numbers=[0], token_ids=[5]),
        ModelRunnerOutput(step=0, numbers=[1], token_ids=[5]),
        ModelRunnerOutput(step=0, numbers=[0], token_ids=[-1]),
    ],
)
def test_result_that_does_not_answer_the_step_is_a_bug(result: ModelRunnerOutput) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    out = must_schedule(scheduler)

    with pytest.raises(RuntimeError, match=r"does not answer|token -1"):
        scheduler.update_from_output(out, result)


def test_token_for_an_unfinished_prompt_is_a_bug() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    scheduler.add_request(request("a", 3))
    out = must_schedule(scheduler)

    with pytest.raises(RuntimeError, match="2 of 3 tokens"):
        scheduler.update_from_output(out, result_of(out, 5))


def test_counters_tell_computed_and_cached_prompt_tokens_apart() -> None:
    scheduler = make_scheduler(has_prefix_cache=True)
    scheduler.add_request(request("a", 10, max_tokens=2))
    first = [*step(scheduler, 5), *step(scheduler, 5)]
    scheduler.add_request(request("b", 10, max_tokens=2))
    second = [*step(scheduler, 5), *step(scheduler, 5)]

    stats = scheduler.stats()
    assert [output.num_cached_tokens for output in first + second] == [0, 0, 8, 0]
    assert stats.prompt_tokens_total == 20
    assert stats.computed_prompt_tokens_total == 12
    assert stats.prefix_cache_query_tokens_total == 20
    assert stats.prefix_cache_hit_tokens_total == 8
    assert stats.generation_tokens_total == 4
    assert stats.steps_total == 4


def test_prefix_is_not_found_before_it_is_computed() -> None:
    scheduler = make_scheduler(has_prefix_cache=True)
    scheduler.add_request(request("a", 10))
    scheduler.add_request(request("b", 10))

    out = must_schedule(scheduler)

    assert [data.num_computed_tokens for data in out.new] == [0, 0]
    assert not set(out.new[0].block_ids) & set(out.new[1].block_ids)


def test_prompt_is_admitted_only_when_all_of_it_has_room() -> None:
    scheduler = make_scheduler(
        num_blocks=4, block_size=4, max_model_len=16, max_num_batched_tokens=5
    )
    scheduler.add_request(request("a", 5))
    scheduler.add_request(request("b", 12))
    step(scheduler, 5)

    out = must_schedule(scheduler)  # 2 blocks are free, b needs 3

    assert out.new == []
    assert out.running.numbers == [0]


def test_cache_that_cannot_hold_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold"):
        make_scheduler(num_blocks=3, block_size=4, max_model_len=13)
