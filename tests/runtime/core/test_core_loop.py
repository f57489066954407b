"""The engine core's loop in a thread of the test, which reaches into its executor."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.core_ends import WAIT_S, CoreThread, request, tokens_of
from tests.support.fake_executor import (
    FAULT_HANG,
    killed_report,
)
from tests.support.fake_model import generate_alone
from vcli.runtime.messages import (
    AbortRequests,
    EngineOutputs,
    ShutdownCore,
    UtilityCall,
    UtilityReply,
)
from vcli.runtime.worker.call_messages import RankActivity
from vcli.topology.errors import ExitStatus


@pytest.fixture
def core() -> Iterator[CoreThread]:
    with CoreThread() as core:
        yield core


def test_worker_that_dies_while_the_core_is_idle_is_told_at_once(core: CoreThread) -> None:
    assert core.client.call("stats").error == ""
    begin_s = time.monotonic()
    core.executor.kill_rank(1)

    report = core.client.failure()

    assert time.monotonic() - begin_s < 1.0
    assert report == killed_report()
    core._thread.join(WAIT_S)
    assert core.status == ExitStatus.DIED_SERVING
    assert core.context.failures == [report]
    assert core.executor.num_shutdowns > 0


def test_drain_refuses_what_comes_and_finishes_what_runs(core: CoreThread) -> None:
    core.executor.gate.clear()
    core.client.send(request("a", [1, 2, 3], max_tokens=50))
    core.client.until_running(1)
    core.client.send(ShutdownCore(drain=True))
    core.client.send(request("b", [1, 2, 3]))

    refused = core.client.outputs_of("b")["b"]
    core.executor.gate.set()
    finished = core.client.outputs_of("a")["a"]

    assert "shutting down" in refused[0].error
    assert tokens_of(finished) == generate_alone([1, 2, 3], 50)
    core._thread.join(WAIT_S)
    assert core.status == ExitStatus.OK


def test_drain_that_lasts_too_long_can_be_cut_short(core: CoreThread) -> None:
    core.client.send(request("a", [FAULT_HANG]))
    core.client.until_running(1)
    core.client.send(ShutdownCore(drain=True))
    core.client.send(ShutdownCore(drain=False))

    assert core.client.outputs_of("a")["a"][0].finish_reason == "abort"
    core._thread.join(WAIT_S)
    assert core.status == ExitStatus.OK


def test_abort_with_nothing_else_running_tells_the_new_state(core: CoreThread) -> None:
    core.client.send(request("a", [FAULT_HANG, 1, 2, 3, 4]))
    core.client.until_running(1)

    core.client.send(AbortRequests(request_ids=["a", "unknown"]))
    core.client.until(lambda message: isinstance(message, EngineOutputs))

    assert core.client.stats.num_running == 0
    assert core.client.stats.num_free_kv_blocks == core.client.stats.num_kv_blocks


def test_request_that_cannot_run_is_answered_and_the_next_one_served(core: CoreThread) -> None:
    core.client.send(request("long", [1] * 64))
    core.client.send(request("wild", [10**6]))
    core.client.send(request("good", [1, 2]))

    outputs = core.client.outputs_of("long", "wild", "good")

    assert "context of 64" in outputs["long"][0].error
    assert "vocabulary" in outputs["wild"][0].error
    assert tokens_of(outputs["good"]) == generate_alone([1, 2], 4)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "add"}),
        msgspec.msgpack.encode({"type": "unheard-of", "call_id": "x"}),
    ],
)
def test_unreadable_frame_is_answered_and_not_fatal(core: CoreThread, frame: bytes) -> None:
    core.client.frames.send(frame)

    reply = core.client.until(lambda message: isinstance(message, UtilityReply))

    assert reply.call_id == -1
    assert "cannot read" in reply.error
    assert core.client.call("ping").error == ""


def test_unreadable_request_is_answered_under_its_id(core: CoreThread) -> None:
    core.client.send({"type": "add", "request_id": "a", "prompt_token_ids": "text"})

    outputs = core.client.outputs_of("a")

    assert outputs["a"][0].finish_reason == "error"
    assert core.client.call("ping").error == ""


def test_unreadable_call_is_answered_under_its_id(core: CoreThread) -> None:
    core.client.send({"type": "call", "call_id": 3, "method": 5})

    reply = core.client.until(lambda message: isinstance(message, UtilityReply))

    assert reply.call_id == 3
    assert reply.error


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        ("no_such", [], "unknown method"),
        ("_serve", [], "unknown method"),
        ("stats", [1, 2], "TypeError"),
        ("collective_rpc", ["load_model"], "may not be called"),
        ("collective_rpc", ["_run"], "may not be called"),
        ("check_health", [0], "timeout_s"),
        ("check_health", ["soon"], "TypeError"),
    ],
)
def test_call_that_is_wrong_is_answered_with_an_error(
    core: CoreThread, method: str, arguments: list[Any], said: str
) -> None:
    reply = core.client.call(method, *arguments)

    assert said in reply.error
    assert core.client.call("ping").error == ""


def test_health_names_the_ranks_that_did_not_answer(core: CoreThread) -> None:
    assert core.client.call("check_health", 0.2).value["answered"] == [0, 1]
    core.executor.stuck_ranks = {1}

    health = core.client.call("check_health", 0.2).value

    assert health["is_healthy"] is False
    assert health["answered"] == [0]
    assert health["missing"] == [1]
    assert "no answer from 1" in health["errors"]["1"]


def test_rank_that_is_only_busy_is_not_missing(core: CoreThread) -> None:
    core.executor.stuck_ranks = {0, 1}
    core.executor.busy_ranks = {1: RankActivity("execute_model", 2.0)}

    health = core.client.call("check_health", 0.2).value

    assert (health["answered"], health["missing"]) == ([], [0])
    assert health["busy"] == {"1": "in execute_model for 2.0 s"}

    core.executor.busy_ranks[0] = RankActivity("check_health", 0.2)
    assert core.client.call("check_health", 0.2).value["missing"] == [0]
    core.executor.busy_ranks[0] = RankActivity("execute_model", 3.0)
    assert core.client.call("check_health", 0.2).value["is_healthy"] is True


def test_requests_go_on_while_health_is_asked(core: CoreThread) -> None:
    core.executor.stuck_ranks = {1}
    core.client.send(UtilityCall(call_id=1, method="check_health", arguments=[30.0]))
    core.client.send(request("a", [1, 2]))

    assert tokens_of(core.client.outputs_of("a")["a"]) == generate_alone([1, 2], 4)


def test_allowed_worker_method_gives_the_values_of_all_ranks(core: CoreThread) -> None:
    assert core.client.call("collective_rpc", "kv_bytes_per_block").value == [1024, 1024]
    reports = core.client.call("collective_rpc", "group_reports").value
    assert reports[1][0]["transport"] == "fake"


def test_second_equal_prompt_computes_only_what_is_new(core: CoreThread) -> None:
    prompt = list(range(1, 22))
    core.client.send(request("a", prompt))
    core.client.outputs_of("a")
    first = core.client.stats

    core.client.send(request("b", prompt))
    outputs = core.client.outputs_of("b")["b"]

    second = core.client.stats
    assert outputs[0].num_cached_tokens == 20
    assert all(output.num_cached_tokens == 0 for output in outputs[1:])
    assert second.computed_prompt_tokens_total - first.computed_prompt_tokens_total == 1
    assert second.prefix_cache_hit_tokens_total == 20
    assert second.prefix_cache_query_tokens_total == 42
    assert core.client.call("reset_prefix_cache").value > 0
    assert core.client.call("check_integrity").value is True
