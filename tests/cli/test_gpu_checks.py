"""Trials from the doctor's side: what is tried, and processes that hang, die or cannot start."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.diagnostics.test_gpu_checks import links
from tests.support.fake_host import HEALTHY_HOST, make_context, run
from tests.support.fake_nvml import FakeGpu, FakeNvml, gpu_facts
from vcli.cli import gpu_checks
from vcli.cli.environment import Environment
from vcli.cli.main import main
from vcli.cli.runtime_checks import registry
from vcli.diagnostics import CheckContext, Status
from vcli.diagnostics.trial import Trial

GIB = 1024**3


def context_of(
    folder: Path, num_gpus: int = 0, config: Mapping[str, int] | None = None, **fields: Any
) -> CheckContext:
    gpus = fields.pop("gpus", gpu_facts(num_gpus))
    host = replace(HEALTHY_HOST, gpus=gpus, links=links("NV18", num_gpus))
    device_type = fields.pop("device_type", "cuda" if num_gpus else "cpu")
    return make_context(folder, host=host, config=config, device_type=device_type, **fields)


# ---- what is tried ------------------------------------------------------------------------------


def test_without_a_plan_all_gpus_are_one_world(tmp_path: Path) -> None:
    request = gpu_checks.request_of(context_of(tmp_path, 4))
    assert (request.devices, request.groups) == ((0, 1, 2, 3), ())


def test_the_ranks_of_a_plan_are_tried_in_its_groups(tmp_path: Path) -> None:
    request = gpu_checks.request_of(context_of(tmp_path, 8, {"tp": 2, "pp": 2}))
    assert request.devices == (0, 1, 2, 3)
    assert request.groups == (
        ("PP", (0, 2)), ("PP", (1, 3)), ("TP", (0, 1)), ("TP", (2, 3)),
    )  # fmt: skip


def test_replicas_have_groups_of_their_own(tmp_path: Path) -> None:
    request = gpu_checks.request_of(context_of(tmp_path, 4, {"tp": 2, "dp": 2}))
    assert request.devices == (0, 1, 2, 3)
    assert request.groups == (("TP", (0, 1)), ("TP", (2, 3)))


@pytest.mark.parametrize(
    ("num_gpus", "config", "fields", "reason"),
    [
        (0, {"tp": 2}, {}, "no NVIDIA GPU"),
        (2, {"tp": 4}, {}, "the plan needs more GPUs (GPU-01)"),
        (2, {"tp": 2}, {"device_type": "cpu"}, "planned for the CPU"),
        (2, {"tp": 2}, {"gpus": gpu_facts(2, is_mig=[False, True])}, "MIG slices are not tried"),
        (2, {"tp": 2}, {"gpus": gpu_facts(2, memory_free_bytes=[79 * GIB, 60 * GIB])},
         "GPU 1 is in use, 20.0 GiB taken (GPU-03): --deep measures beside it"),
    ],
)  # fmt: skip
def test_what_is_not_tried_has_a_reason(
    tmp_path: Path, num_gpus: int, config: dict[str, int], fields: dict[str, Any], reason: str
) -> None:
    assert gpu_checks.request_of(context_of(tmp_path, num_gpus, config, **fields)).skip_reason == (
        reason
    )


def test_a_deep_run_measures_beside_others_and_on_a_cpu(tmp_path: Path) -> None:
    taken = gpu_facts(2, memory_free_bytes=40 * GIB)
    busy = context_of(tmp_path, 2, {"tp": 2}, gpus=taken, is_deep=True)
    assert gpu_checks.request_of(busy).devices == (0, 1)
    request = gpu_checks.request_of(context_of(tmp_path, config={"tp": 1}, is_deep=True))
    assert (request.devices, request.device_type) == ((0, 1), "cpu")


def test_checks_that_ask_at_the_same_time_share_one_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def run_trial(context: CheckContext, additions: Mapping[str, str]) -> Trial:
        runs.append(dict(additions))
        return Trial(skip_reason="told")

    monkeypatch.setattr(gpu_checks, "run_trial", run_trial)
    context = gpu_checks.with_trials(context_of(tmp_path))
    assert context.try_devices({}) is context.try_devices({})
    context.try_devices({"NCCL_P2P_DISABLE": "1"})
    assert runs == [{}, {"NCCL_P2P_DISABLE": "1"}]


# ---- processes ----------------------------------------------------------------------------------

#: Writes the steps that it is told, then does what it is told.
RANK = """
import json, os, signal, sys, time
rank = int(sys.argv[1])
def write(step, state, **found):
    print(json.dumps({"rank": rank, "step": step, "state": state, **found}), flush=True)
for step in sys.argv[2].split(","):
    write(step, "started")
    if step != sys.argv[2].split(",")[-1]:
        write(step, "done", seconds=0.0)
"""


def try_ranks(
    monkeypatch: pytest.MonkeyPatch, context: CheckContext, *ends: tuple[str, str]
) -> Trial:
    """A trial whose ranks get as far as the last of some steps, and there run some Python."""
    from vcli.runtime.distributed import probe_ranks

    commands = [[sys.executable, "-c", RANK + end, str(rank), steps]
                for rank, (steps, end) in enumerate(ends)]  # fmt: skip
    monkeypatch.setattr(probe_ranks, "rank_commands", lambda *args, **more: commands)
    return gpu_checks.run_trial(context, {})


def verdict(context: CheckContext, trial: Trial, id_: str) -> Any:
    return run(registry().get(id_), replace(context, try_devices=lambda additions: trial))


@pytest.mark.process
def test_a_hang_is_killed_and_the_rank_behind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "STEP_LIMIT_S", 3.0)
    context = context_of(tmp_path, 2, {"tp": 2})
    trial = try_ranks(
        monkeypatch, context, ("device,join,gloo", "signal.pause()"),
        ("device,join", "signal.pause()"),
    )  # fmt: skip
    result = verdict(context, trial, "COLL-01")
    assert result.status is Status.FAIL
    assert "killed: rank 1 (GPU 1) in 'join'; rank 0 (GPU 0) in 'gloo'" in result.measured


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV in 'peer memory'"),
        ("sys.exit('driver says no')", "ended with status 1 in 'peer memory': driver says no"),
    ],
)
def test_a_process_that_dies_is_named_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, said: str
) -> None:
    context = context_of(tmp_path, 2, {"tp": 2})
    trial = try_ranks(
        monkeypatch, context, ("device,peer memory", "signal.pause()"), ("device,peer memory", end)
    )
    result = verdict(context, trial, "LINK-02")
    assert result.status is Status.FAIL
    assert result.measured == f"rank 1 (GPU 1) {said}"


@pytest.mark.process
def test_an_environment_without_torch_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vcli.runtime.distributed import probe_ranks

    commands = [[sys.executable, "-S", "-c", "import torch"]] * 2
    monkeypatch.setattr(probe_ranks, "rank_commands", lambda *args, **more: commands)
    context = context_of(tmp_path, 2, {"tp": 2})
    result = verdict(context, gpu_checks.run_trial(context, {}), "PROC-07")
    assert result.status is Status.FAIL
    assert "cannot import torch" in result.measured
    assert "pip install" in result.remedy


@pytest.mark.process
def test_a_system_that_gives_no_process_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vcli.runtime.distributed import probe_ranks

    monkeypatch.setattr(
        probe_ranks, "rank_commands", lambda *args, **more: [["/no/such/interpreter"]]
    )
    context = gpu_checks.with_trials(context_of(tmp_path, 2, {"tp": 2}))
    result = run(registry().get("PROC-07"), context)
    assert result.status is Status.UNKNOWN
    assert "cannot start" in result.measured


@pytest.mark.process
@pytest.mark.slow
def test_gloo_joins_and_sums_between_real_processes(real_environ: dict[str, str]) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    environment = Environment(
        argv=("doctor", "coll", "proc-07", "-tp", "2", "--device", "cpu", "--deep", "--json"),
        environ=real_environ, cwd=Path.cwd(), stdout=stdout, stderr=io.StringIO(),
    )  # fmt: skip
    assert main(environment) == 0
    document = json.loads(stdout.buffer.getvalue())
    by_id = {item["id"]: item for item in document["checks"]}
    assert [by_id[id_]["status"] for id_ in ("PROC-07", "COLL-01", "COLL-02", "COLL-03")] == (
        ["pass"] * 4
    )
    assert "right in TP" in by_id["COLL-03"]["measured"]
    assert by_id["COLL-04"]["status"] == "skip"


@pytest.mark.process
@pytest.mark.slow
def test_a_stopped_process_of_a_real_trial_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_environ: dict[str, str]
) -> None:
    from vcli.runtime.distributed import probe_ranks

    class Stopping(probe_ranks.ProbeRanks):
        def _take(self, rank: int, line: bytes) -> None:
            super()._take(rank, line)
            if rank == 1 and self.steps[1] == "product":
                self.children[1].send_signal(signal.SIGSTOP)

    monkeypatch.setattr(probe_ranks, "ProbeRanks", Stopping)
    monkeypatch.setattr(gpu_checks, "STEP_LIMIT_S", 5.0)
    context = context_of(tmp_path, config={"tp": 2}, is_deep=True, environ=real_environ)
    trial = gpu_checks.run_trial(context, {})
    assert trial.broken_step in ("product", "join")
    assert "rank 1 in 'product'" in trial.problem_text() or (
        "rank 1 in 'join'" in trial.problem_text()
    )


# ---- the fork server ----------------------------------------------------------------------------


class FakeServer:
    """A fork server of this process's pid."""

    problem = ""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.preloaded = SimpleNamespace(seconds=1.5, problem=self.problem)
        self.is_closed = False

    @classmethod
    def start(cls) -> "FakeServer":
        return cls()

    def close(self) -> None:
        self.is_closed = True


def ask_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str = "", **fields: Any
) -> Any:
    from vcli.runtime.process import fork_owner

    monkeypatch.setattr(fork_owner, "ForkServer", FakeServer)
    monkeypatch.setattr(FakeServer, "problem", problem)
    return run(gpu_checks.fork_server, context_of(tmp_path, **fields))


def nvml_with(pids: list[int]) -> Callable[..., Any]:
    running = [SimpleNamespace(pid=pid) for pid in pids]
    return FakeNvml([FakeGpu(), FakeGpu(answers={"ComputeRunningProcesses": running})])


def test_a_fork_server_without_a_context_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ask_fork_server(tmp_path, monkeypatch, num_gpus=2, nvml_module=nvml_with([1]))
    assert result.status is Status.PASS
    assert "no CUDA context" in result.measured


def test_a_fork_server_that_nvml_lists_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = nvml_with([os.getpid()])
    result = ask_fork_server(tmp_path, monkeypatch, num_gpus=2, nvml_module=own)
    assert result.status is Status.FAIL
    assert f"NVML lists the server (pid {os.getpid()}) on GPU 1" in result.measured


def test_a_fork_server_that_cannot_be_copied_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ask_fork_server(tmp_path, monkeypatch, "2 threads are alive", is_deep=True)
    assert result.status is Status.FAIL
    assert "2 threads are alive" in result.remedy


# ---- the command --------------------------------------------------------------------------------


def listed(*arguments: str) -> tuple[int, str, str]:
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    status = main(
        Environment(argv=("doctor", *arguments), environ={}, cwd=Path.cwd(), stdout=stdout,
                    stderr=stderr)
    )  # fmt: skip
    return status, stdout.buffer.getvalue().decode(), stderr.buffer.getvalue().decode()


def test_a_fast_run_has_no_check_of_level_3_unless_it_is_named() -> None:
    deep = {check.id for check in registry().checks if check.level.value == "L3"}
    _, out, _ = listed("coll", "link", "--fast", "--json")
    assert deep.isdisjoint(item["id"] for item in json.loads(out)["checks"])
    _, out, _ = listed("coll-04", "--fast", "--json")
    assert [item["id"] for item in json.loads(out)["checks"]] == ["COLL-04"]


def test_fast_and_deep_contradict_each_other() -> None:
    status, out, err = listed("--fast", "--deep")
    assert (status, out) == (2, "")
    assert "--fast and --deep" in err


def test_the_doctor_itself_imports_no_torch() -> None:
    import subprocess

    code = (
        "import sys; from vcli.cli.runtime_checks import registry; registry();"
        "import vcli.runtime.distributed.probe_ranks; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
