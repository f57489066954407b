"""COLL: what came out when the ranks of the plan's groups summed together; see `trials`."""

from collections.abc import Mapping
from typing import Any, Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.checks.cuda import NO_GPU
from vcli.diagnostics.checks.trials import BASE, TRIAL_S, judge_trial, pcie_of
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.link_speeds import (
    HEALTHY_NVLINK_SUM,
    HEALTHY_PCIE_SUM,
    link_gbps,
    pair_kinds,
    worst_kind,
)
from vcli.diagnostics.text import listing, plural, size_text
from vcli.diagnostics.trial import Trial

LARGE_BYTES: Final = 256 << 20
SMALL_BYTES: Final = 8 << 10
ONE_GROUP: Final = "no two GPUs"
_SUM: Final = "all-reduce"
#: Steps in which NCCL works.
NCCL_STEPS: Final = ("first sum", "results", "graph", "end")
#: One at a time: what each of them takes away from NCCL.
SWITCHES: Final[Mapping[str, tuple[str, str]]] = {
    "NCCL_P2P_DISABLE": ("1", "copies between GPUs fail: LINK-02, LINK-06"),
    "NCCL_SHM_DISABLE": ("1", "shared memory fails: LIM-01, LIM-02"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand fails: IB-01, IB-02"),
}


@check(
    "COLL-01",
    "ranks find each other (gloo)",
    level=Level.L3,
    why="the ranks' control channel does not come up, and the start ends after minutes",
    expected="a right sum over all processes",
    remedy=Remedy(
        bare_metal="export GLOO_SOCKET_IFNAME=lo   (one node), and vcli doctor host-04 env-02",
        docker="docker run -e GLOO_SOCKET_IFNAME=lo …   (one node), and vcli doctor host-04 env-02",
    ),
    requires=(BASE,),
)
def gloo(context: CheckContext) -> Finding:
    """Joins a process for each device through gloo, and sums a number over them.

    On a machine without a GPU only with `--deep`.
    """

    def judge(trial: Trial) -> Finding:
        seconds = max(event["seconds"] for event in trial.done("gloo"))
        return passed(f"{plural(len(trial.devices), 'rank')} in {seconds:.1f} s")

    return judge_trial(context, ("join", "gloo"), judge)


@check(
    "COLL-02",
    "the groups of the plan join",
    level=Level.L3,
    why="the start hangs there until its deadline",
    expected="a first sum in every group",
    remedy=Remedy(
        bare_metal="vcli doctor coll-06 --deep   finds the switch that helps; NCCL_DEBUG=INFO "
        "vcli doctor coll-02 -v   shows more"
    ),
    requires=(BASE,),
)
def groups_join(context: CheckContext) -> Finding:
    """Makes the world and each TP, PP, DP and other group of the plan, and sums in each.

    Without a plan of several ranks all visible GPUs are one group. A hang names who is in which
    step.
    """

    def judge(trial: Trial) -> Finding:
        events = trial.done("first sum")
        groups = {(event["kind"], tuple(event["ranks"])) for event in events}
        seconds = max(event["seconds"] for event in events)
        return passed(f"{_library(trial)}: {plural(len(groups), 'group')}, {seconds:.1f} s at most")

    # Leaving is the last step of all, and counts only where it fails.
    has_left = context.try_devices({}).broken_step != "end"
    return judge_trial(context, ("first sum",) if has_left else ("end",), judge)


@check(
    "COLL-03",
    "collectives give right results",
    level=Level.L3,
    why="wrong sums are wrong tokens, without an error",
    expected="exact results of four operations in every group",
    remedy=Remedy(
        bare_metal="vcli doctor link-02; vcli doctor coll-06 --deep   finds the switch that helps"
    ),
    requires=("COLL-02",),
)
def results(context: CheckContext) -> Finding:
    """All-reduce, all-gather, broadcast and all-to-all of numbers that tell rank and element."""

    def judge(trial: Trial) -> Finding:
        events = trial.done("results")
        wrong = [
            f"{', '.join(event['wrong'])} of {event['kind']} on {trial.name(event['rank'])}"
            for event in events
            if event["wrong"]
        ]
        if wrong:
            return failed(listing(wrong))
        kinds = listing(list(dict.fromkeys(event["kind"] for event in events)), limit=8)
        return passed(f"right in {kinds}")

    return judge_trial(context, ("results",), judge)


@check(
    "COLL-04",
    "bandwidth of a sum",
    level=Level.L3,
    why="every layer waits for its sums",
    expected="over NVLink 5/9 of what the links carry (18 of a Hopper: 250 GB/s), over PCIe 60 %",
    remedy=Remedy(bare_metal="vcli doctor link gpu-09 -v"),
    requires=("COLL-02",),
    is_headline=True,
)
def bandwidth(context: CheckContext) -> Finding:
    """Times sums of 8 KiB to 256 MiB in the world, and of 256 MiB in each other group.

    The bus bandwidth is compared with what the slowest link within the group carries. Where the
    driver allows no peer access it is only told.
    """

    def judge(trial: Trial) -> Finding:
        sums = _sums(trial)
        slow = []
        for kind, events in sums.items():
            for event in events:
                floor = _floor(context, trial, event["ranks"])
                if floor is not None and event["busbw_GBps"] < floor[0]:
                    slow.append(
                        f"{kind} {_devices(trial, event['ranks'])} {event['busbw_GBps']:.0f} GB/s "
                        f"over {floor[1]}, {floor[0]:.0f} expected"
                    )
        text = ", ".join(
            f"{kind} {min(event['busbw_GBps'] for event in events):.0f} GB/s"
            for kind, events in sums.items()
        )
        small = max((e["us"] for e in trial.done(f"{_SUM} {SMALL_BYTES}")), default=None)
        text = f"sums of {size_text(LARGE_BYTES)}: {text}"
        if small is not None:
            text += f"; {small:.0f} µs at 8 KiB"
        if not slow:
            return passed(text)
        switch = _switched_off(context)
        return warned(
            f"{listing(slow)}; {text}" + (f"; {switch} is set" if switch else ""),
            remedy=f"unset {switch.partition('=')[0]}" if switch else "",
        )

    broken = context.try_devices({}).broken_step
    steps = (f"{_SUM} {LARGE_BYTES}", *([broken] if _SUM in broken else []))
    return judge_trial(context, steps, judge)


def _sums(trial: Trial) -> dict[str, list[Mapping[str, Any]]]:
    """The largest sums by kind of group, one for each group."""
    found: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
    for event in trial.events:
        step = str(event.get("step"))
        if event.get("state") == "done" and step.endswith(f"{_SUM} {LARGE_BYTES}"):
            found.setdefault((event["kind"], tuple(event["ranks"])), event)
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for (kind, _), event in found.items():
        by_kind.setdefault(kind, []).append(event)
    return by_kind


def _floor(context: CheckContext, trial: Trial, ranks: list[int]) -> tuple[float, str] | None:
    """The least healthy bandwidth of a group in GB/s, and its slowest kind of link."""
    devices = [trial.devices[rank] for rank in ranks]
    kinds = pair_kinds(context.host.links)
    within = [kind for pair, kind in kinds.items() if pair <= set(devices)]
    gpu = next((gpu for gpu in context.host.gpus if gpu.index in devices), None)
    if any(link.can_access_peer is False for link in context.host.links) or gpu is None:
        return None
    kind = worst_kind(within)
    full = link_gbps(kind, gpu, pcie_of(trial)) if kind else None
    if full is None:
        return None
    part = HEALTHY_NVLINK_SUM if kind.startswith("NV") else HEALTHY_PCIE_SUM
    return part * full, kind


def _switched_off(context: CheckContext) -> str:
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_ALGO",
                 "NCCL_PROTO", "NCCL_MAX_NCHANNELS"):  # fmt: skip
        value = context.environ.get(name, "").strip()
        if value not in ("", "0"):
            return f"{name}={value}"
    return ""


def _devices(trial: Trial, ranks: list[int]) -> str:
    return "-".join(str(trial.devices[rank]) for rank in ranks)


def _library(trial: Trial) -> str:
    if trial.device_type != "cuda":
        return "gloo"
    return f"NCCL {trial.done('device')[0].get('nccl', '')}".strip()


@check(
    "COLL-06",
    "what helps where NCCL fails",
    level=Level.L3,
    why="the switch that helps names the part that is broken",
    expected="no switch is needed",
    remedy=Remedy(bare_metal="export {switch}   (slower; then mend what it names: {cause})"),
    requires=(BASE,),
    deadline_s=3 * TRIAL_S + 2,
)
def switches(context: CheckContext) -> Finding:
    """Where NCCL failed or hung, tries again without P2P, shared memory and InfiniBand.

    One at a time, in new processes, and only with `--deep`. NVLink multicast is off in every trial
    unless NCCL_NVLS_ENABLE is set.
    """
    trial = context.try_devices({})
    if trial.device_type != "cuda" or len(trial.devices) < 2:
        return skipped(ONE_GROUP if trial.device_type == "cuda" else NO_GPU)
    if not _is_broken(trial):
        return passed("none is needed")
    if not context.is_deep:
        return skipped("NCCL fails; vcli doctor coll-06 --deep tries its switches")
    tried = []
    for name, (value, cause) in SWITCHES.items():
        if context.environ.get(name) == value:
            continue
        again = context.try_devices({name: value})
        if again.events and not _is_broken(again):
            switch = f"{name}={value}"
            return warned(f"NCCL works with {switch}: {cause}",
                          values={"switch": switch, "cause": cause})  # fmt: skip
        tried.append(f"{name}={value}")
    return failed(
        f"NCCL fails with each of {listing(tried, limit=8)} too: {trial.problem_text()}",
        remedy="NCCL_DEBUG=INFO vcli doctor coll-02 -v   and look at LINK, LIM and CUDA",
    )


def _is_broken(trial: Trial) -> bool:
    step = trial.broken_step
    has_wrong = any(event["wrong"] for event in trial.done("results"))
    return has_wrong or step in NCCL_STEPS or _SUM in step


@check(
    "COLL-08",
    "a sum in a CUDA graph",
    level=Level.L3,
    why="decoding replays graphs, and a sum that hangs or errs in one hangs the engine",
    expected="right results of a captured and replayed all-reduce",
    remedy=Remedy(bare_metal="--enforce-eager, or another NCCL   (COLL-07 knows broken ones)"),
    requires=("COLL-02",),
)
def graph(context: CheckContext) -> Finding:
    """Captures all-reduces of 64 KiB, replays them with new numbers, and compares the sums."""

    def judge(trial: Trial) -> Finding:
        return passed(f"{max(event['us'] for event in trial.done('graph')):.0f} µs for 64 KiB")

    return judge_trial(context, ("graph",), judge)


@check(
    "COLL-09",
    "NCCL's status server",
    level=Level.L3,
    why="at a hang it tells which rank waits for which",
    expected="an answer while ranks are joined",
    remedy=Remedy(bare_metal="unset NCCL_RAS_ENABLE; export NCCL_RAS_ADDR=localhost:28028"),
    requires=("COLL-02",),
)
def status_server(context: CheckContext) -> Finding:
    """Asks NCCL's status server (RAS, since 2.24) of the ranks of the trial. Never fails."""
    trial = context.try_devices({})
    if trial.status_server:
        return passed(f"answers: {plural(len(trial.status_server.splitlines()), 'line')}")
    return skipped(trial.status_server_problem or "no ranks that NCCL joins")


CHECKS = (gloo, groups_join, results, bandwidth, switches, graph, status_server)
