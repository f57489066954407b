"""CUDA: device nodes, visible devices, MIG and compute modes."""

import os
import re
from typing import Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.checks.cuda import NO_GPU
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.gpu import Nvml
from vcli.diagnostics.text import listing, plural
from vcli.topology import GpuFacts

_PROHIBITED: Final = 2
_COMPUTE_MODES: Final = {1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


@check(
    "CUDA-05",
    "device nodes",
    why="a process that may not open them sees no GPU",
    expected="/dev/nvidiactl, /dev/nvidia-uvm and a node for each GPU, open to this user",
    remedy=Remedy(
        bare_metal="sudo nvidia-modprobe -c 0 -u; ls -l /dev/nvidia*",
        docker="docker run --gpus all …   (it adds the device nodes)",
        kubernetes="resources: limits: nvidia.com/gpu: N",
        slurm="#SBATCH --gres=gpu:N",
    ),
    is_preflight=True,
)
def device_nodes(context: CheckContext) -> Finding:
    """Looks for the nodes and for the right to read and write them; none is opened."""
    if not context.has_nvidia:
        return skipped(NO_GPU)
    nodes = [name for name in context.files.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
    if context.host.is_wsl or not (nodes or context.files.exists("/dev/nvidiactl")):
        if context.host.gpus:
            return skipped("this driver has no device nodes of that name")
        return failed("no /dev/nvidia* at all", blocks_launch=context.is_cuda)
    wanted = ["nvidiactl", "nvidia-uvm", *nodes]
    missing = [f"/dev/{name}" for name in wanted if not context.files.exists(f"/dev/{name}")]
    closed = [
        f"/dev/{name}"
        for name in wanted
        if f"/dev/{name}" not in missing
        and not os.access(context.files.path(f"/dev/{name}"), os.R_OK | os.W_OK)
    ]
    if missing or closed:
        text = listing([*(f"{name} is missing" for name in missing),
                        *(f"{name} is closed to this user" for name in closed)])  # fmt: skip
        return failed(text, blocks_launch=context.is_cuda)
    if not nodes:
        return failed("no /dev/nvidia0", blocks_launch=context.is_cuda)
    return passed(plural(len(nodes), "node"))


@check(
    "CUDA-06",
    "CUDA_VISIBLE_DEVICES",
    level=Level.L1,
    why="CUDA stops reading at the first entry that it does not know, and shows fewer GPUs",
    expected="known, different entries, at least as many as ranks on this node",
    remedy=Remedy(
        bare_metal="export CUDA_VISIBLE_DEVICES={devices}",
        docker="docker run --gpus '\"device={devices}\"' …",
        slurm="leave CUDA_VISIBLE_DEVICES to Slurm: #SBATCH --gres=gpu:{count}",
    ),
    requires=("CUDA-01",),
    is_preflight=True,
)
def visible_devices(context: CheckContext) -> Finding:
    """Reads the variable as CUDA does: numbers, GPU- and MIG- ids, up to the first unknown one.

    Fails for duplicates, unknown entries, and fewer GPUs than ranks here. Warns for numbers
    without CUDA_DEVICE_ORDER=PCI_BUS_ID where the GPUs differ: CUDA counts the fastest first.
    """
    value = context.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return passed("not set: all are visible")
    entries = [part.strip() for part in value.split(",") if part.strip()]
    total = _num_physical(context)
    count = len(context.local_ranks) if context.is_cuda else 1
    values = {"devices": ",".join(map(str, range(max(count, 1)))), "count": count}
    doubled = sorted({entry for entry in entries if entries.count(entry) > 1})
    if doubled:
        return failed(f"CUDA_VISIBLE_DEVICES={value} names {listing(doubled)} twice", values=values)
    bad = [entry for entry in entries if not _is_known(entry, total)]
    if bad or len(context.host.gpus) < len(entries):
        what = listing(bad) or entries[len(context.host.gpus)]
        return failed(
            f"CUDA_VISIBLE_DEVICES={value}: {what} is unknown, so CUDA shows "
            f"{plural(len(context.host.gpus), 'GPU')}",
            values=values,
        )
    if context.is_cuda and len(entries) < count:
        return failed(
            f"CUDA_VISIBLE_DEVICES={value} shows {plural(len(entries), 'GPU')} for "
            f"{plural(count, 'rank')}",
            values=values,
        )
    table = listing([f"{gpu.index}={gpu.pci_bus_id or gpu.uuid}" for gpu in context.host.gpus])
    is_mixed = len({gpu.name for gpu in context.host.gpus}) > 1
    by_bus = context.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if is_mixed and not by_bus and any(entry.isdigit() for entry in entries):
        return warned(
            f"numbers on different GPUs without CUDA_DEVICE_ORDER: {table}",
            remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            why="CUDA counts the fastest GPU first, nvidia-smi by bus",
        )
    return passed(table or "no GPU is visible")


def _num_physical(context: CheckContext) -> int:
    count = context.open_nvml().ask(lambda nvml: nvml.nvmlDeviceGetCount())
    return int(count or 0)


def _is_known(entry: str, total: int) -> bool:
    if entry.lstrip("-").isdigit():
        return 0 <= int(entry) < total
    return entry.startswith(("GPU-", "MIG-"))


@check(
    "CUDA-08",
    "no MIG slices in a group",
    level=Level.L1,
    why="slices cannot reach each other's memory, and NCCL refuses two ranks on one GPU",
    expected="whole GPUs for tensor and pipeline parallelism",
    remedy=Remedy(
        bare_metal="-tp 1 with one slice for each replica, or sudo nvidia-smi -i {index} -mig 0",
        kubernetes="ask for whole GPUs: nvidia.com/gpu, not nvidia.com/mig-…",
    ),
    requires=("CUDA-01",),
)
def mig(context: CheckContext) -> Finding:
    """Asks each GPU of the plan for its MIG mode."""
    sliced = [gpu.index for gpu in context.gpus if gpu.is_mig]
    if not sliced:
        return passed("MIG is off")
    text = f"MIG is on for GPU {listing([str(index) for index in sliced])}"
    if context.is_cuda and context.plan.world_size > 1:
        return failed(text, values={"index": sliced[0]})
    return passed(f"{text}: one replica per slice")


@check(
    "CUDA-09",
    "compute mode",
    level=Level.L1,
    why="the mode decides how many processes may use the GPU",
    expected="DEFAULT",
    remedy=Remedy(bare_metal="sudo nvidia-smi -i {index} -c 0"),
    requires=("CUDA-01",),
)
def compute_mode(context: CheckContext) -> Finding:
    """Asks each GPU for its compute mode: PROHIBITED fails, exclusive ones warn."""
    session = context.open_nvml()
    found: list[tuple[int, int]] = []
    for gpu in context.gpus:
        mode = _mode_of(session, gpu)
        if mode:
            found.append((gpu.index, int(mode)))
    if not found:
        return passed("DEFAULT")
    text = listing([f"GPU {index} is {_COMPUTE_MODES.get(mode, mode)}" for index, mode in found])
    values = {"index": found[0][0]}
    if any(mode == _PROHIBITED for _, mode in found):
        return failed(text, values=values)
    return warned(text, values=values)


def _mode_of(session: Nvml, gpu: GpuFacts) -> int | None:
    handle = session.handle(gpu)
    return session.ask(lambda nvml: int(nvml.nvmlDeviceGetComputeMode(handle)))


@check(
    "CUDA-11",
    "nodes for NVLink SHARP",
    why="without them NCCL cannot use multicast over NVSwitch, and may fail when it tries",
    expected="/dev/nvidia-caps on machines with NVSwitch",
    remedy=Remedy(
        bare_metal="sudo nvidia-modprobe -f /proc/driver/nvidia/capabilities/fabric-imex-mgmt, or "
        "accept NCCL_NVLS_ENABLE=0",
        docker="docker run --device /dev/nvidia-caps …   or accept -e NCCL_NVLS_ENABLE=0",
        kubernetes='expose /dev/nvidia-caps, or env NCCL_NVLS_ENABLE: "0"',
    ),
)
def caps_nodes(context: CheckContext) -> Finding:
    """Looks for /dev/nvidia-caps where GPUs are joined by NVSwitch.

    Where NCCL_NVLS_ENABLE=0 is set nothing is missing, and the variable is left alone.
    """
    if not context.has_nvidia:
        return skipped(NO_GPU)
    if context.environ.get("NCCL_NVLS_ENABLE") == "0":
        return passed("NCCL_NVLS_ENABLE=0: not needed")
    if not _has_switch(context):
        return skipped("no NVSwitch")
    if context.files.exists("/dev/nvidia-caps"):
        return passed("/dev/nvidia-caps is there")
    return warned("/dev/nvidia-caps is missing")


def _has_switch(context: CheckContext) -> bool:
    if any(name.startswith("nvidia-nvswitch") for name in context.files.names("/dev")):
        return True
    kinds = [link.kind for link in context.host.links]
    return len(context.host.gpus) >= 4 and bool(kinds) and all(k.startswith("NV") for k in kinds)


CHECKS = (device_nodes, visible_devices, mig, compute_mode, caps_nodes)
