"""What vcli itself prints of a failure, read back by `explain`."""

import signal

import pytest

from vcli.diagnostics.explain import Explanation, explain_log
from vcli.runtime.errors import FailureReport
from vcli.runtime.process.failures import describe_exit, exit_hint

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def failure(kind: str, message: str, **fields: object) -> str:
    usual = {"process": "Worker_TP1", "phase": "serving", "rank": 1, "pid": 71, "host": "node0"}
    report = FailureReport(**{**usual, **fields, "kind": kind, "message": message})
    return f"error: {report.describe()}"


def explain(*lines: str, cuts: int = 1) -> Explanation:
    data = "".join(f"{line}\n" for line in lines).encode()
    size = -(-len(data) // cuts)
    return explain_log([data[i : i + size] for i in range(0, len(data), size)])


def names(explained: Explanation) -> list[str]:
    return [match.symptom.name for match in explained.matches]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (failure("", describe_exit(-signal.SIGKILL)), "own-killed"),
        (failure("", describe_exit(-signal.SIGSEGV)), "own-ended-by-signal"),
        (failure("", describe_exit(-35)), "own-ended-by-signal"),
        (failure("", describe_exit(3)), "own-failed"),
        (failure("WeightLoadError", "no such tensor", phase="weights"), "own-failed"),
        (failure("ValueError", "x", phase="KV cache", pid=None, host=""), "own-failed"),
        (failure("NodeLost", "gone", process="node1", rank=None, pid=None), "own-failed"),
        (
            failure("StartTimeout", "not ready after 9 s", process="EngineCore", rank=None),
            "own-start-timeout",
        ),
        (
            failure("RendezvousError", "4 ranks, 2 had not joined: ranks 2, 3", phase="joined"),
            "own-ranks-missing",
        ),
        ("error: node 1 did not come within 600 s", "own-ranks-missing"),
        (
            failure(
                "RpcTimeoutError",
                "execute_model: no answer within 60 s from rank 1 (Worker_TP1)",
                phase="execute_model",
            ),
            "own-stalled",
        ),
        (
            "01:40:12 ERROR EngineCore vcli.runtime.executor.rpc: execute_model runs for over "
            "30 s: rank 1 (Worker_TP1) has not come to the all_reduce",
            "own-stalled",
        ),
    ],
)
def test_each_line_of_a_failure_is_recognised_and_shown(line: str, name: str) -> None:
    explained = explain("model  tiny", line)
    assert names(explained) == [name]
    match = explained.matches[0]
    assert match.evidence[0].text == line
    assert match.remedy
    assert match.cause == match.cause.replace("WHO", "").replace("PHASE", "")


@pytest.mark.parametrize("arrow", ["→", "->"])
@pytest.mark.parametrize("cuts", [1, 2, 3, 50])
def test_the_hint_below_is_the_remedy_wherever_the_log_is_cut(arrow: str, cuts: int) -> None:
    hint = exit_hint(-signal.SIGKILL)
    line = failure("", describe_exit(-signal.SIGKILL))
    explained = explain("  → of another line", line, f"  {arrow} {hint}", cuts=cuts)
    assert explained.matches[0].remedy == hint
    assert [item.line for item in explained.matches[0].evidence] == [2, 3]


def test_a_message_of_two_lines_has_its_hint_below_both() -> None:
    explained = explain(failure("LoadError", "first\nsecond"), "  → look there")
    assert explained.matches[0].remedy == "look there"


def test_a_hint_far_below_is_of_another_line() -> None:
    explained = explain(failure("LoadError", "x"), *["x"] * 20, "  → look there")
    assert "traceback" in explained.matches[0].remedy


def test_a_cause_that_is_known_goes_before_our_own_words() -> None:
    explained = explain(OOM, failure("StartTimeout", "not ready", phase="weights"))
    assert names(explained) == ["gpu-out-of-memory"]
    assert [match.symptom.name for match in explained.followers] == ["own-start-timeout"]
    assert names(explain(failure("OutOfMemoryError", OOM))) == ["gpu-out-of-memory"]


def test_our_own_words_go_before_a_consequence() -> None:
    explained = explain("EngineDeadError: gone", failure("WeightLoadError", "bad", phase="weights"))
    assert names(explained) == ["own-failed"]
    assert [match.symptom.name for match in explained.followers] == ["engine-dead"]


@pytest.mark.parametrize(
    "line",
    [
        "INFO ApiServer: engine dead: EngineCore failed in shutdown: it was shut down",
        "error: the build failed in stage 2: no compiler",
        "INFO a test failed in serving: killed by SIGKILL",
        "the job runs for over 30 s: fine",
    ],
)
def test_lines_that_only_look_alike_are_none_of_ours(line: str) -> None:
    assert names(explain(line)) == []
