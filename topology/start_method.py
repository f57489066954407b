"""How child processes come into being: spawn, fork or the fork server, with every reason."""

from typing import Final, Literal, cast, get_args

from vcli.topology.decision import Decision
from vcli.topology.errors import ConfigError
from vcli.topology.facts import ProcessFacts

StartMethod = Literal["spawn", "fork", "forkserver"]

#: What is used where nothing was asked for and nothing stands against it.
DEFAULT_START_METHOD: Final[StartMethod] = "forkserver"


def decide_start_method(
    process: ProcessFacts, requested: str | None = None
) -> Decision[StartMethod]:
    """The start method for this process.

    Fork copies only the calling thread, so it is granted only when asked for and nothing is alive
    that it would break. Where the fork server or fork cannot be, it is spawn.

    Raises:
        ConfigError: `requested` is no start method.
    """
    if requested not in (None, "auto", *get_args(StartMethod)):
        raise ConfigError(
            f"start_method={requested!r} is unknown",
            hint=f"--start-method: auto, {', '.join(get_args(StartMethod))}",
        )
    wanted = DEFAULT_START_METHOD if requested in (None, "auto") else cast(StartMethod, requested)
    origin = "the default" if requested in (None, "auto") else "asked for"
    against = _reasons_against(wanted, process)
    if against:
        refused = f"{wanted}, {origin}, is not possible here"
        return Decision(name="start_method", value="spawn", reasons=(refused, *against))
    return Decision(
        name="start_method", value=wanted, reasons=(_REASONS[wanted].format(origin=origin),)
    )


_REASONS: Final = {
    "spawn": "{origin}: each child is a new interpreter started by vcli's own launcher, so no "
    "thread, lock or device state of this process reaches it",
    "fork": "{origin}: one thread, no CUDA, no XPU and no OpenMP pool is alive in this process",
    "forkserver": "{origin}: children are copies of a server that has imported torch and never "
    "touches a device",
}


def _reasons_against(method: StartMethod, process: ProcessFacts) -> tuple[str, ...]:
    if method == "spawn":
        return ()
    reasons = []
    if process.platform != "linux":
        reasons.append(f"{method} is used on Linux only, this is {process.platform}")
    if process.in_ray_actor:
        reasons.append("this process is a Ray actor, whose threads a copy would lack")
    if method == "forkserver":
        return tuple(reasons)
    if process.numa_bind:
        reasons.append("NUMA binding must be in force before the first allocation of the child")
    if process.cuda_initialized:
        by = f" by {process.cuda_initialized_by}" if process.cuda_initialized_by else ""
        reasons.append(f"CUDA was initialised in this process{by}, and does not survive a fork")
    if process.xpu_initialized:
        reasons.append("XPU was initialised in this process, and does not survive a fork")
    if process.is_wsl:
        reasons.append("this is WSL, where a forked process cannot use the GPU")
    if process.has_libgomp_pool:
        reasons.append("an OpenMP pool (libgomp) is alive, and hangs in a forked process")
    if process.num_threads > 1:
        reasons.append(
            f"{process.num_threads} threads are alive, and a lock that one of them holds stays "
            "locked for ever in a forked process"
        )
    return tuple(reasons)
