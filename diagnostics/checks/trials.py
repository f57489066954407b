"""CUDA, GPU, LINK, PROC: what came out when processes tried the devices; they share one trial."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final

from vcli.diagnostics.check import (
    Finding,
    Level,
    Remedy,
    check,
    failed,
    passed,
    skipped,
    warned,
)
from vcli.diagnostics.checks.cuda import NO_GPU
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.link_speeds import HEALTHY_COPY, link_gbps, pair_kinds
from vcli.diagnostics.text import listing, plural
from vcli.diagnostics.trial import Trial

#: A trial has ended, or was ended, by then.
TRIAL_S: Final = 58.0
BASE: Final = "PROC-07"
ONE_DEVICE: Final = "one GPU"
#: Slower than the fastest by more than this is told.
_SLOW: Final = 2.0
_OUTLIER_PART: Final = 0.7

_FREE_MEMORY: Final = "stop what holds its memory: vcli doctor gpu-03   (it names the process)"


def judge_trial(
    context: CheckContext, steps: tuple[str, ...], judge: Callable[[Trial], Finding]
) -> Finding:
    """`judge` where all ranks did the steps; a failure where it broke in one of them.

    Where it broke elsewhere, that is another check's failure, and this one is skipped.
    """
    trial = context.try_devices({})
    if trial.skip_reason:
        return skipped(trial.skip_reason)
    if trial.broken_step in steps:
        remedy = _FREE_MEMORY if trial.is_out_of_memory() else ""
        rank = int(trial.problems[0]["rank"])
        return failed(trial.problem_text(), remedy=remedy, values=_values(trial, rank))
    if not all(trial.is_done(step) for step in steps):
        if trial.problems:
            return skipped(f"not reached: {trial.problem_text()}")
        return skipped(ONE_DEVICE if trial.device_type == "cuda" else NO_GPU)
    return judge(trial)


def _values(trial: Trial, rank: int) -> dict[str, object]:
    """The GPU of a rank and the others, for remedies."""
    index = trial.devices[rank]
    others = ",".join(str(other) for other in trial.devices if other != index)
    return {"index": index, "others": others or "''"}


@check(
    BASE,
    "torch starts in child processes",
    level=Level.L3,
    why="no worker can start",
    expected="a process for each device that has imported torch",
    remedy=Remedy(
        bare_metal="python -c 'import torch'   shows it; pip install 'torch>=2.11' in the "
        "environment of vcli"
    ),
    deadline_s=TRIAL_S + 2,
)
def processes_start(context: CheckContext) -> Finding:
    """Starts a process for each device, which runs the steps of all checks of this level.

    They are: the device itself, its products and copies, and the groups of the plan, all
    together. Whoever makes no progress in a step is killed, with all others. Devices that somebody
    uses are left alone without `--deep`, and so are processes on a CPU.
    """

    trial = context.try_devices({})
    if trial.skip_reason:
        return skipped(trial.skip_reason)
    if trial.broken_step == "start":
        return failed(trial.problem_text())
    count = len(trial.devices)
    return passed("one process" if count == 1 else f"{count} processes")


@check(
    "CUDA-10",
    "torch has kernels for the GPUs",
    level=Level.L3,
    why="the first kernel fails with 'no kernel image is available'",
    expected="the GPU's compute capability among those that torch was built for",
    remedy=Remedy(
        bare_metal="install a torch for this GPU, by the line that "
        "https://pytorch.org/get-started/locally shows"
    ),
    requires=(BASE, "CUDA-07"),
)
def architectures(context: CheckContext) -> Finding:
    """Takes each GPU in a process of its own, runs a kernel, and asks torch what it was built for.

    Binary code runs on the same major capability with an equal or higher minor one.
    """

    def judge(trial: Trial) -> Finding:
        if trial.device_type != "cuda":
            return skipped(NO_GPU)
        for event in trial.done("device"):
            major, minor = event["capability"]
            if not _covers(event["architectures"], major, minor):
                built = ", ".join(event["architectures"]) or "none"
                return failed(
                    f"{trial.name(event['rank'])} has sm_{major}{minor}, torch is built for {built}"
                )
        first = trial.done("device")[0]
        capability = "".join(map(str, first["capability"]))
        return passed(f"sm_{capability} in torch {first['torch']}")

    return judge_trial(context, ("device",), judge)


def _covers(architectures: list[str], major: int, minor: int) -> bool:
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = int("".join(filter(str.isdigit, digits)) or 0)
        if kind == "sm" and number // 10 == major and number % 10 <= minor:
            return True
        if kind == "compute" and number <= major * 10 + minor:
            return True
    return False


@check(
    "PROC-08",
    "no fork from a process that uses CUDA",
    level=Level.L3,
    why="CUDA does not survive a fork: the children fail at their first call",
    expected="spawn where fork is asked for, with CUDA named as the reason",
    remedy=Remedy(bare_metal="--start-method forkserver; this is a bug in vcli: please report it"),
    requires=(BASE,),
)
def start_method_with_cuda(context: CheckContext) -> Finding:
    """Asks the runtime for the start method in a process that has CUDA in use."""

    def judge(trial: Trial) -> Finding:
        for event in trial.done("start method"):
            if not event["cuda_initialized"] or event["fork"] == "fork":
                return failed(
                    f"{trial.name(event['rank'])} uses CUDA, and would start children by "
                    f"{event['fork']}"
                )
        first = trial.done("start method")[0]
        reason = next((text for text in first["reasons"] if "CUDA" in text), "")
        return passed(f"fork becomes {first['fork']}: {reason}; default {first['default']}")

    return judge_trial(context, ("start method",), judge)


@check(
    "GPU-09",
    "PCIe link under load",
    level=Level.L3,
    why="a link of fewer lanes slows every copy to and from the host",
    expected="as many lanes and as high a generation as the GPU and its slot have",
    remedy=Remedy(
        bare_metal="nvidia-smi -q -d PCIE -i {index}; reseat the GPU or its riser, and look for "
        "bifurcation and ASPM in the BIOS"
    ),
    requires=(BASE,),
)
def pcie_link(context: CheckContext) -> Finding:
    """Copies pinned memory both ways, and asks NVML for the link meanwhile: idle ones rest."""

    def judge(trial: Trial) -> Finding:
        events = trial.done("host copies")
        slow = []
        for event in events:
            if "width" not in event:
                continue
            if event["width"] < event["max_width"] or event["gen"] < event["max_gen"]:
                slow.append(
                    (event["rank"], f"{_link_text(event)} of gen{event['max_gen']} "
                     f"x{event['max_width']}")
                )  # fmt: skip
        to, back = (min(e[name] for e in events) for name in ("to_device_GBps", "from_device_GBps"))
        speed = f"{to:.0f} GB/s to the GPU, {back:.0f} back"
        if slow:
            text = listing([f"{trial.name(rank)} has {link}" for rank, link in slow])
            return warned(f"{text}; {speed}", values={"index": trial.devices[slow[0][0]]})
        known = next((_link_text(event) for event in events if "width" in event), "link not told")
        return passed(f"{known}, {speed}")

    return judge_trial(context, ("host copies",), judge)


def _link_text(event: Mapping[str, Any]) -> str:
    return f"gen{event['gen']} x{event['width']}"


@check(
    "GPU-12",
    "products are right",
    level=Level.L3,
    why="a GPU that computes wrongly gives wrong tokens without a word",
    expected="exact products, in at most twice the time of the fastest GPU",
    remedy=Remedy(
        bare_metal="leave GPU {index} out: CUDA_VISIBLE_DEVICES={others}; then dcgmi diag -r 3 -i "
        "{index}"
    ),
    requires=(BASE,),
)
def products(context: CheckContext) -> Finding:
    """Multiplies matrices of small whole numbers on all GPUs at once, whose results are exact."""

    def judge(trial: Trial) -> Finding:
        if trial.device_type != "cuda":
            return skipped(NO_GPU)
        events = trial.done("product")
        fastest = min(event["ms"] for event in events)
        for event in events:
            index = trial.devices[event["rank"]]
            values = _values(trial, event["rank"])
            if event["num_wrong"]:
                return failed(f"GPU {index}: {event['num_wrong']} wrong rows", values=values)
            if event["ms"] > _SLOW * fastest > 0:
                return warned(f"GPU {index}: {event['ms']:g} ms, the fastest {fastest:g} ms",
                              values=values)  # fmt: skip
        return passed(f"right on {plural(len(events), 'GPU')}, {fastest:g} ms at 4096 rows")

    return judge_trial(context, ("product",), judge)


@check(
    "LINK-02",
    "data arrive over each pair of GPUs",
    level=Level.L3,
    why="peer writes that never arrive give wrong sums or hangs, though the driver says OK",
    expected="every byte of a copy over each ordered pair, at 40 % of what the link carries",
    remedy=Remedy(
        bare_metal="iommu=pt on the kernel's command line, ACS off in the BIOS   (LINK-06); until "
        "then export NCCL_P2P_DISABLE=1",
        docker="on the host: iommu=pt and ACS off   (LINK-06); until then docker run -e "
        "NCCL_P2P_DISABLE=1 …",
    ),
    requires=(BASE,),
    is_headline=True,
)
def pair_copies(context: CheckContext) -> Finding:
    """Copies 16 MiB into the memory of each other GPU, where it is compared; every ordered pair.

    Pairs without a GPU in common run at the same time.
    """

    def judge(trial: Trial) -> Finding:
        found = trial.done("peer memory")[0]
        if found["reason"]:
            if any(link.can_access_peer is False for link in context.host.links):
                return skipped(f"the driver allows no peer access (LINK-01): {found['reason']}")
            return warned(
                f"memory cannot be shared: {found['reason']}",
                why="the fast all-reduce is off, NCCL sums everything",
                remedy="vcli doctor link-01 link-06 -v",
            )
        pairs = [_pair_on_devices(trial, pair) for pair in found["pairs"]]
        wrong = [f"{_arrow(pair)} {pair['wrong_bytes']} bytes"
                 for pair in pairs if pair["wrong_bytes"]]  # fmt: skip
        if wrong:
            return failed(f"wrong after a copy: {listing(wrong)}")
        return _judge_speeds(context, trial, pairs)

    return judge_trial(context, ("peer memory",), judge)


def _judge_speeds(context: CheckContext, trial: Trial, pairs: list[dict[str, Any]]) -> Finding:
    kinds = pair_kinds(context.host.links)
    gpus = {gpu.index: gpu for gpu in context.host.gpus}
    speeds = [pair["GBps"] for pair in pairs]
    text = f"{len(pairs)} of {len(pairs)} copies right, {min(speeds):.0f}"
    if round(max(speeds)) > round(min(speeds)):
        text += f" to {max(speeds):.0f}"
    text += " GB/s"
    slow = []
    for pair in pairs:
        kind = kinds.get(frozenset((pair["src"], pair["dst"])), "")
        full = link_gbps(kind, gpus[pair["src"]], pcie_of(trial)) if pair["src"] in gpus else None
        if full is not None and pair["GBps"] < HEALTHY_COPY * full:
            slow.append(f"{_arrow(pair)} {pair['GBps']:.0f} of {full:.0f} GB/s ({kind})")
    if slow:
        return warned(f"{text}; slow: {listing(slow)}", remedy="vcli doctor link gpu-09 -v")
    return passed(text)


def pcie_of(trial: Trial) -> tuple[int, int] | None:
    """Generation and lanes of the narrowest link, as seen under load."""
    known = [(e["gen"], e["width"]) for e in trial.done("host copies") if "width" in e]
    return min(known, default=None)


@check(
    "LINK-10",
    "no slow pair of GPUs",
    level=Level.L3,
    why="a group is as slow as its slowest pair",
    expected="each pair at 70 % of the median of pairs that are linked alike",
    remedy=Remedy(bare_metal="nvidia-smi nvlink -s -i {index}; nvidia-smi nvlink -e -i {index}"),
    requires=("LINK-02",),
)
def pair_outliers(context: CheckContext) -> Finding:
    """Compares the speed of each ordered pair with the others of the same kind of link."""
    trial = context.try_devices({})
    kinds = pair_kinds(context.host.links)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for pair in (_pair_on_devices(trial, raw) for raw in trial.done("peer memory")[0]["pairs"]):
        kind = kinds.get(frozenset((pair["src"], pair["dst"])), "")
        by_kind.setdefault(kind, []).append(pair)
    if not any(len(pairs) > 2 for pairs in by_kind.values()):
        return skipped("no two pairs that are linked alike")
    for kind, pairs in by_kind.items():
        median = statistics.median(pair["GBps"] for pair in pairs)
        slow = [pair for pair in pairs if pair["GBps"] < _OUTLIER_PART * median]
        if slow:
            text = listing([f"{_arrow(pair)} {pair['GBps']:.0f} GB/s" for pair in slow])
            return warned(f"{text}, the median of {kind or 'all'} is {median:.0f}",
                          values={"index": slow[0]["src"]})  # fmt: skip
    return passed("none")


def _pair_on_devices(trial: Trial, pair: Mapping[str, Any]) -> dict[str, Any]:
    devices = {name: trial.devices[pair[name]] for name in ("src", "dst")}
    return {**pair, **devices}


def _arrow(pair: Mapping[str, Any]) -> str:
    return f"{pair['src']}→{pair['dst']}"


CHECKS = (
    processes_start, architectures, start_method_with_cuda, pcie_link, products, pair_copies,
    pair_outliers,
)  # fmt: skip
