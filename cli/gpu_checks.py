"""Trials of devices for the checks of level L3: processes of the runtime, started and watched here.

A context gets its trials by `with_trials`; the checks that judge them stand in `diagnostics`.
"""

import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vcli.diagnostics import CheckContext, Finding, Level, Remedy, check, failed, passed, skipped
from vcli.diagnostics.checks.cuda import NO_GPU
from vcli.diagnostics.checks.gpu import is_taken
from vcli.diagnostics.checks.trials import TRIAL_S
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.gpu import Nvml
from vcli.diagnostics.ras import ask_ras, ras_address
from vcli.diagnostics.text import size_text
from vcli.diagnostics.trial import Trial
from vcli.topology import GpuFacts, RankPlan

#: Nobody writes a line for so long: a hang. Before their first line processes import torch.
STEP_LIMIT_S: Final = 20.0
START_LIMIT_S: Final = 45.0
_RAS_S: Final = 4.0
_MAX_CPU_RANKS: Final = 8
_FORK_SERVER_S: Final = 40.0
#: NCCL tries multicast by itself, and a failed attempt can put a host's GPUs out of service.
_NO_NVLS: Final = {"NCCL_NVLS_ENABLE": "0"}
_CUDA_NODE: Final = "/dev/nvidia-uvm"

Groups = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """`devices` by rank, `groups` of ranks by kind; empty `devices` with the reason."""

    devices: tuple[int, ...] = ()
    device_type: str = "cuda"
    groups: Groups = ()
    skip_reason: str = ""


def with_trials(context: CheckContext) -> CheckContext:
    """The context, which now tries devices when a check asks for it."""
    return replace(context, try_devices=_Trials(context))


def request_of(context: CheckContext) -> TrialRequest:
    """What is tried for the plan of a context: its ranks here, else every visible GPU.

    On a CPU only in a deep run, and so beside somebody who uses a GPU.
    """
    if not context.is_cuda:
        return _request_of_cpu(context)
    gpus, ranks = context.gpus, context.local_ranks
    reason = _reason_against(context)
    if reason:
        return TrialRequest(skip_reason=reason)
    devices = tuple(rank.device_index for rank in ranks)
    if len(ranks) > 1 and set(devices) == {gpu.index for gpu in gpus}:
        return TrialRequest(devices=devices, groups=_groups(ranks))
    return TrialRequest(devices=tuple(gpu.index for gpu in gpus))


def _request_of_cpu(context: CheckContext) -> TrialRequest:
    if not context.is_deep:
        return TrialRequest(skip_reason="planned for the CPU" if context.host.gpus else NO_GPU)
    ranks = context.local_ranks
    num_ranks = min(max(len(ranks), 2), _MAX_CPU_RANKS)
    groups = _groups(ranks) if num_ranks == len(ranks) else ()
    return TrialRequest(devices=tuple(range(num_ranks)), device_type="cpu", groups=groups)


def _reason_against(context: CheckContext) -> str:
    """Why the GPUs are not tried; empty: they are."""
    if not context.host.gpus:
        return context.gpu_problem or NO_GPU
    if len(context.local_ranks) > len(context.host.gpus):
        return "the plan needs more GPUs (GPU-01)"
    if any(gpu.is_mig for gpu in context.gpus):
        return "MIG slices are not tried"
    taken = next((gpu for gpu in context.gpus if is_taken(gpu)), None)
    if taken is None or context.is_deep:
        return ""
    held = (taken.memory_total_bytes or 0) - (taken.memory_free_bytes or 0)
    return (
        f"GPU {taken.index} is in use, {size_text(held)} taken (GPU-03): --deep measures beside it"
    )


def _groups(ranks: tuple[RankPlan, ...]) -> Groups:
    """The groups of several ranks that lie on this node; members are places in `ranks`."""
    worlds = [(rank.external_dp_rank, rank.dp_rank if _is_split(ranks) else 0) for rank in ranks]
    places = {(world, rank.global_rank): place
              for place, (world, rank) in enumerate(zip(worlds, ranks, strict=True))}  # fmt: skip
    found: dict[tuple[str, tuple[int, ...]], None] = {}
    for world, rank in zip(worlds, ranks, strict=True):
        for group in rank.groups:
            members = tuple(places.get((world, member), -1) for member in group.ranks)
            if len(members) > 1 and -1 not in members:
                found[group.kind.value, tuple(sorted(members))] = None
    return tuple(sorted(found))


def _is_split(ranks: tuple[RankPlan, ...]) -> bool:
    """Whether each replica has a torch world of its own, so that ranks repeat."""
    return len({rank.global_rank for rank in ranks}) < len(ranks)


@dataclass
class _Trials:
    """Runs each trial once, whichever of the checks asks first; the others wait for it."""

    context: CheckContext
    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: dict[tuple[tuple[str, str], ...], Trial] = field(default_factory=dict)

    def __call__(self, additions: Mapping[str, str]) -> Trial:
        key = tuple(sorted(additions.items()))
        with self.lock:
            if key not in self.kept:
                self.kept[key] = run_trial(self.context, additions)
            return self.kept[key]


def run_trial(context: CheckContext, additions: Mapping[str, str]) -> Trial:
    """Starts the processes and follows them to their end; blocks for at most `TRIAL_S`.

    Raises:
        CannotMeasureError: the system gives no process.
    """
    from vcli.runtime.distributed.probe_ranks import ProbeRanks, open_store, rank_commands
    from vcli.runtime.process.environ import one_host_environ, worker_environ

    request = request_of(context)
    if request.skip_reason:
        return Trial(skip_reason=request.skip_reason)
    environ = worker_environ(
        context.environ,
        additions=one_host_environ() | _NO_NVLS | dict(additions),
        omp_num_threads=1,
    )
    listener = _Listener(environ, len(request.devices) > 1 and request.device_type == "cuda")
    try:
        with open_store() as store:
            commands = rank_commands(
                request.devices, store, device_type=request.device_type, groups=request.groups
            )
            ranks = ProbeRanks(commands, listener, environ)
            try:
                ranks.follow(STEP_LIMIT_S, start_limit_s=START_LIMIT_S, total_s=TRIAL_S - 3)
            finally:
                ranks.end()
    except OSError as error:
        raise CannotMeasureError(f"the processes of the trial cannot start: {error}") from error
    return Trial(
        devices=request.devices,
        device_type=request.device_type,
        events=tuple(listener.events),
        status_server=listener.answer,
        status_server_problem=listener.problem,
    )


def _own_status_server(environ: Mapping[str, str]) -> dict[str, str]:
    """A free port for NCCL's status server, so that none of others answers, nor hears of us."""
    if "NCCL_RAS_ADDR" in environ:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"NCCL_RAS_ADDR": f"127.0.0.1:{probe.getsockname()[1]}"}


@dataclass
class _Listener:
    """Keeps what the ranks write; asks NCCL's status server once while all of them are joined."""

    environ: Mapping[str, str]
    asks_nccl: bool
    events: list[dict[str, Any]] = field(default_factory=list)
    answer: str = ""
    problem: str = ""

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        is_joined = event["step"] == "first sum" and event["state"] == "done"
        if self.asks_nccl and (is_joined or event["state"] == "hung"):
            self.asks_nccl = False
            self._ask()

    def _ask(self) -> None:
        try:
            address = ras_address(self.environ)
            if address is None:
                self.problem = "NCCL_RAS_ENABLE=0"
                return
            self.answer = ask_ras(*address, deadline_s=_RAS_S)
        except CannotMeasureError as error:
            self.problem = str(error)


@check(
    "PROC-09",
    "fork server leaves the GPUs alone",
    level=Level.L3,
    why="copies of a process that has used CUDA fail at their first call",
    expected="torch imported, one thread, no CUDA context of the server on any GPU",
    remedy=Remedy(bare_metal="--start-method spawn; what is wrong: {problem}"),
    deadline_s=_FORK_SERVER_S + 5,
)
def fork_server(context: CheckContext) -> Finding:
    """Starts the fork server as `serve` does, and looks at its files and at NVML's list of it.

    On a machine without a GPU only with `--deep`.
    """
    from vcli.runtime.process.fork_owner import ForkServer
    from vcli.topology import UnfitError

    if not (context.host.gpus or context.is_deep):
        return skipped(NO_GPU)
    try:
        server = ForkServer.start()
    except UnfitError as error:
        return failed(error.message, values={"problem": error.message})
    try:
        end = context.clock() + _FORK_SERVER_S
        while (ready := server.preloaded) is None:
            if context.clock() > end:
                raise CannotMeasureError(f"no torch in it after {_FORK_SERVER_S:g} s")
            context.pause(0.05)
        problem = ready.problem or _touched(context, server.pid)
    finally:
        server.close()
    if problem:
        return failed(problem, values={"problem": problem})
    return passed(f"ready after {ready.seconds:.1f} s, no CUDA context")


def _touched(context: CheckContext, pid: int) -> str:
    """What of a GPU the process has open; empty: nothing."""
    files = context.files
    for number in files.names(f"/proc/{pid}/fd"):
        target = files.target(f"/proc/{pid}/fd/{number}")
        if target.startswith(_CUDA_NODE):
            return f"the server has {target} open"
    if not context.host.gpus:
        return ""
    session = context.open_nvml()
    for gpu in context.host.gpus:
        if pid in _pids_on(session, gpu):
            return f"NVML lists the server (pid {pid}) on GPU {gpu.index}"
    return ""


def _pids_on(session: Nvml, gpu: GpuFacts) -> tuple[int, ...]:
    handle = session.handle(gpu)
    running = session.ask(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return tuple(int(process.pid) for process in running or ())


CHECKS = (fork_server,)
