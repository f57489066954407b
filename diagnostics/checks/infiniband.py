"""IB: InfiniBand and RoCE cards of this host, from sysfs."""

import re
from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.text import listing, plural

_ROOT: Final = "/sys/class/infiniband"
_NO_CARD: Final = "no InfiniBand or RoCE card"
_COUNTERS: Final = (
    "counters/symbol_error",
    "counters/link_downed",
    "counters/port_rcv_errors",
    "counters/port_xmit_discards",
    "hw_counters/out_of_sequence",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/packet_seq_err",
)


def ports(context: CheckContext) -> list[tuple[str, str]]:
    """(device, port) of every card that NCCL_IB_HCA leaves."""
    rule = context.environ.get("NCCL_IB_HCA", "")
    found = []
    for device in context.files.names(_ROOT):
        if _is_chosen(device, rule):
            found += [(device, port) for port in context.files.names(f"{_ROOT}/{device}/ports")]
    return found


def _is_chosen(device: str, rule: str) -> bool:
    """NCCL's grammar: prefixes, `=` exact, `^` all but."""
    if not rule:
        return True
    is_excluding, rest = rule.startswith("^"), rule.lstrip("^")
    is_exact, rest = rest.startswith("="), rest.lstrip("=")
    names = [name.split(":")[0] for name in rest.split(",") if name]
    fits = any(device == name if is_exact else device.startswith(name) for name in names)
    return fits != is_excluding


def _text(context: CheckContext, device: str, port: str, name: str) -> str:
    return (context.files.read(f"{_ROOT}/{device}/ports/{port}/{name}") or "").strip()


@check(
    "IB-01",
    "ports are active",
    why="NCCL falls back to TCP, ten times slower, without a word",
    expected="every chosen port ACTIVE, all at one rate",
    remedy=Remedy(
        bare_metal="ibstat {device}; check the cable and the subnet manager (sudo systemctl "
        "start opensm); or leave it out: export NCCL_IB_HCA=^{device}",
    ),
)
def active(context: CheckContext) -> Finding:
    """Reads state and rate of each port that NCCL_IB_HCA leaves.

    A down port fails where NCCL_IB_HCA names it or no other is active, else it warns.
    """
    chosen = ports(context)
    if not chosen:
        return skipped(_NO_CARD)
    down = [
        (device, port, _text(context, device, port, "state"))
        for device, port in chosen
        if "ACTIVE" not in _text(context, device, port, "state")
    ]
    rates = {_text(context, device, port, "rate") for device, port in chosen
             if (device, port) not in [(d, p) for d, p, _ in down]}  # fmt: skip
    if down:
        text = listing([f"{device} port {port} is {state}" for device, port, state in down])
        values = {"device": down[0][0]}
        if context.environ.get("NCCL_IB_HCA") or len(down) == len(chosen):
            return failed(text, values=values)
        return warned(text, values=values)
    if len(rates) > 1:
        return warned(f"different rates: {listing(sorted(rates))}", values={"device": chosen[0][0]})
    return passed(f"{plural(len(chosen), 'port')}, {next(iter(rates)) or 'rate unknown'}")


@check(
    "IB-02",
    "cards can be used by programs",
    why="NCCL falls back to TCP where it cannot open the card",
    expected="a /dev/infiniband/uverbs node for the cards",
    remedy=Remedy(
        bare_metal="sudo modprobe ib_uverbs; sudo apt-get install libibverbs1 rdma-core",
        docker="docker run --device /dev/infiniband --cap-add IPC_LOCK …",
        kubernetes="the RDMA device plugin's resource in limits, or hostPath /dev/infiniband",
    ),
)
def access(context: CheckContext) -> Finding:
    """Looks for the device nodes where sysfs shows cards."""
    devices = context.files.names(_ROOT)
    if not devices:
        return skipped(_NO_CARD)
    nodes = [n for n in context.files.names("/dev/infiniband") if n.startswith("uverbs")]
    if not nodes:
        return failed(f"{plural(len(devices), 'card')}, and no /dev/infiniband/uverbs*")
    return passed(f"{plural(len(nodes), 'node')} for {plural(len(devices), 'card')}")


@check(
    "IB-03",
    "RoCE v2 address",
    why="with a GID of version 1 or without address the other side is not found",
    expected="a RoCE v2 GID with IPv4 on every Ethernet port, and NCCL_IB_GID_INDEX on one",
    remedy=Remedy(
        bare_metal="export NCCL_IB_GID_INDEX={index}   (or unset it where it is wrong; {device} "
        "needs an IPv4 address)",
        docker="docker run --network host -e NCCL_IB_GID_INDEX={index} …",
    ),
)
def roce_gid(context: CheckContext) -> Finding:
    """Reads the types of the GIDs of each Ethernet port."""
    ethernet = [item for item in ports(context)
                if _text(context, *item, "link_layer") == "Ethernet"]  # fmt: skip
    if not ethernet:
        return skipped("no RoCE port")
    wanted = context.environ.get("NCCL_IB_GID_INDEX", "")
    for device, port in ethernet:
        good = _v2_indices(context, device, port)
        values = {"index": good[0] if good else "N", "device": device}
        if not good:
            return failed(f"{device} port {port} has no RoCE v2 GID with IPv4", values=values)
        if wanted.isdigit() and int(wanted) not in good:
            return warned(
                f"NCCL_IB_GID_INDEX={wanted} is no RoCE v2 GID with IPv4 on {device}", values=values
            )
    return passed(f"{plural(len(ethernet), 'port')} with RoCE v2")


def _v2_indices(context: CheckContext, device: str, port: str) -> list[int]:
    base = f"{_ROOT}/{device}/ports/{port}"
    found = []
    for name in context.files.names(f"{base}/gid_attrs/types"):
        kind = (context.files.read(f"{base}/gid_attrs/types/{name}") or "").strip()
        gid = (context.files.read(f"{base}/gids/{name}") or "").strip()
        if "v2" in kind.lower() and re.match(r"^(0000:){5}ffff:", gid):
            found.append(int(name))
    return sorted(found)


@check(
    "IB-06",
    "no new errors on the wire",
    why="packets that must be sent again slow every collective of the cluster",
    expected="counters that stand still",
    remedy=Remedy(
        bare_metal="perfquery -x; check cable and transceiver of {device}, and PFC and ECN on "
        "RoCE switches",
    ),
    deadline_s=4.0,
)
def errors(context: CheckContext) -> Finding:
    """Reads the error counters of each port twice, a fifth of a second apart."""
    chosen = ports(context)
    if not chosen:
        return skipped(_NO_CARD)
    before = _read_counters(context, chosen)
    if not before:
        return skipped("these cards do not count errors")
    context.pause(0.2)
    after = _read_counters(context, chosen)
    grown = [key for key, count in after.items() if count > before.get(key, count)]
    if grown:
        text = listing([f"{device} {name.rsplit('/', 1)[-1]} +{after[key] - before[key]}"
                        for key in grown for device, _, name in [key]])  # fmt: skip
        return warned(f"{text} in 0.2 s", values={"device": grown[0][0]})
    return passed("none")


def _read_counters(
    context: CheckContext, chosen: list[tuple[str, str]]
) -> dict[tuple[str, str, str], int]:
    found: dict[tuple[str, str, str], int] = {}
    for device, port in chosen:
        for name in _COUNTERS:
            value = context.files.read_int(f"{_ROOT}/{device}/ports/{port}/{name}")
            if value is not None:
                found[device, port, name] = value
    return found


@check(
    "IB-07",
    "GPUDirect RDMA",
    why="without it every transfer goes through host memory",
    expected="nvidia_peermem loaded, or a kernel with DMA-BUF (5.12) and the open GPU module",
    remedy=Remedy(
        bare_metal="sudo modprobe nvidia-peermem; echo nvidia-peermem | sudo tee "
        "/etc/modules-load.d/nvidia-peermem.conf",
        docker="on the host: sudo modprobe nvidia-peermem",
    ),
)
def gpu_direct(context: CheckContext) -> Finding:
    """With GPUs and RDMA cards, looks for the module or for what makes DMA-BUF possible."""
    if not context.files.names(_ROOT) or not context.host.gpus:
        return skipped(_NO_CARD if context.host.gpus else "no NVIDIA GPU")
    if context.files.exists("/sys/module/nvidia_peermem"):
        return passed("nvidia_peermem is loaded")
    match = re.match(r"(\d+)\.(\d+)", context.host.kernel)
    has_dma_buf = bool(match) and (int(match[1]), int(match[2])) >= (5, 12)  # type: ignore[index]
    module = context.files.read("/proc/driver/nvidia/version") or ""
    if has_dma_buf and "Open Kernel Module" in module:
        return passed("DMA-BUF with the open GPU module")
    return warned("neither nvidia_peermem nor DMA-BUF with the open GPU module")


CHECKS = (active, access, roce_gid, errors, gpu_direct)
