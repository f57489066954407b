"""GPU: number, likeness, memory and health of the devices that the plan would use."""

import pwd
from typing import Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.checks.cuda import NO_GPU
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.gpu import Nvml
from vcli.diagnostics.holders import age_of, age_text, command_of
from vcli.diagnostics.text import GIB, listing, plural, size_text
from vcli.topology import GpuFacts

#: CUDA context, libraries and the smallest cache beside the weights.
OTHER_GPU_BYTES: Final = 2 * GIB
#: More than this part of the whole, or these bytes, is told where no model says what is needed.
TAKEN_PART: Final = 0.1
TAKEN_BYTES: Final = 2 * GIB


def is_taken(gpu: GpuFacts) -> bool:
    """Whether somebody holds more of it than the driver and a desktop do."""
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    if free is None or total is None:
        return False
    return total - free > min(TAKEN_PART * total, TAKEN_BYTES)


def _others(context: CheckContext, index: int) -> str:
    return ",".join(str(gpu.index) for gpu in context.host.gpus if gpu.index != index)


def _values(context: CheckContext, index: int) -> dict[str, object]:
    return {"index": index, "others": _others(context, index)}


@check(
    "GPU-01",
    "a GPU for each rank",
    level=Level.L1,
    why="two ranks on one GPU fail when NCCL joins them",
    expected="as many visible GPUs as ranks on this node",
    remedy=Remedy(
        bare_metal="{flags}",
        docker="{flags}   (or show more: docker run --gpus all …)",
        kubernetes="{flags}   (or resources: limits: nvidia.com/gpu: {count})",
        slurm="{flags}   (or #SBATCH --gres=gpu:{count})",
    ),
    is_preflight=True,
)
def enough(context: CheckContext) -> Finding:
    """Counts the visible GPUs against the ranks of this node."""
    if not context.is_cuda:
        return skipped("planned for the CPU" if context.has_nvidia else NO_GPU)
    ranks, gpus = len(context.local_ranks), len(context.host.gpus)
    if gpus >= ranks:
        return passed(f"{plural(gpus, 'GPU')} for {plural(ranks, 'rank')}")
    nodes = -(-ranks // gpus) if gpus else 0
    flags = f"-tp {gpus}" if gpus else "--device cpu"
    if nodes > 1 and ranks % nodes == 0:
        flags += f", or --nnodes {nodes * context.nnodes}"
    reason = f" ({context.gpu_problem})" if context.gpu_problem else ""
    return failed(
        f"{plural(gpus, 'GPU')} for {plural(ranks, 'rank')}{reason}",
        values={"flags": flags, "count": ranks},
        is_typed=not reason,
    )


@check(
    "GPU-02",
    "GPUs of one kind in a group",
    level=Level.L1,
    why="the slowest or smallest GPU of a group decides for all",
    expected="equal compute capability, and memory within 5 %",
    remedy=Remedy(bare_metal="CUDA_VISIBLE_DEVICES={devices}   chooses equal ones"),
    requires=("CUDA-01",),
)
def alike(context: CheckContext) -> Finding:
    """Compares compute capability and memory of the GPUs that the plan uses."""
    gpus = context.gpus
    if len(gpus) < 2:
        return skipped("one GPU" if gpus else NO_GPU)
    kinds: dict[object, list[int]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.compute_capability), []).append(gpu.index)
    largest = max(kinds.values(), key=len)
    values = {"devices": ",".join(map(str, largest))}
    capabilities = {gpu.compute_capability for gpu in gpus if gpu.compute_capability}
    text = listing([f"GPU {gpu.index} {gpu.name}" for gpu in gpus], limit=8)
    if len(capabilities) > 1:
        shown = ", ".join(f"{a}.{b}" for a, b in sorted(capabilities))
        if context.is_cuda and context.plan.config.tp > 1:
            return failed(f"compute capabilities {shown}: {text}", values=values)
        return warned(f"compute capabilities {shown}: {text}", values=values)
    sizes = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
    if sizes and min(sizes) < 0.95 * max(sizes):
        return warned(f"{size_text(min(sizes))} to {size_text(max(sizes))}", values=values)
    return passed(f"{len(gpus)}× {gpus[0].name}")


@check(
    "GPU-03",
    "free memory, and who holds the rest",
    level=Level.L1,
    why="a GPU that is partly taken ends the start with 'out of memory'",
    expected="the weights of a rank and 2 GiB free on each GPU",
    remedy=Remedy(
        bare_metal="{kill}, or choose others: CUDA_VISIBLE_DEVICES={others}",
        docker="{kill} on the host, or choose others: docker run --gpus '\"device={others}\"' …",
    ),
    requires=("CUDA-01",),
    is_preflight=True,
)
def free_memory(context: CheckContext) -> Finding:
    """Asks each GPU for its free memory and for the processes on it.

    Without a model it warns where more than a tenth, or 2 GiB, is taken. Processes of other
    containers show no command.
    """
    session = context.open_nvml()
    memory = context.plan.memory
    need = memory.max_weight_bytes + OTHER_GPU_BYTES if memory and context.is_cuda else None
    short: list[tuple[GpuFacts, int]] = []
    for gpu in context.gpus:
        free = gpu.memory_free_bytes
        if free is None:
            continue
        if free < need if need is not None else is_taken(gpu):
            short.append((gpu, free))
    if not short:
        least = min((gpu.memory_free_bytes or 0 for gpu in context.gpus), default=0)
        return passed(f"{size_text(least)} free on each")
    first, free = short[0]
    holders = _holders(context, session, first)
    pids = " ".join(str(pid) for pid, _ in holders)
    wanted = f", {size_text(need)} needed" if need is not None else ""
    text = f"GPU {first.index} has {size_text(free)} free{wanted}"
    if holders:
        text += f"; held by {listing([name for _, name in holders])}"
    if len(short) > 1:
        text += f"; {len(short) - 1} more GPU(s) are short too"
    values = {
        "kill": f"kill {pids}" if pids else "stop what holds it",
        **_values(context, first.index),
    }
    return failed(text, values=values) if need is not None else warned(text, values=values)


def _holders(context: CheckContext, session: Nvml, gpu: GpuFacts) -> list[tuple[int, str]]:
    handle = session.handle(gpu)
    running = session.ask(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    found = []
    for process in running or ():
        pid = int(process.pid)
        if not context.files.exists(f"/proc/{pid}"):
            found.append((pid, f"pid {pid} (in another container)"))
            continue
        age = age_of(context.files, pid)
        parts = [f"user {_user_of(context, pid)}"]
        if age is not None:
            parts.append(age_text(age))
        found.append((pid, f"pid {pid} '{command_of(context.files, pid)}' ({', '.join(parts)})"))
    return found


def _user_of(context: CheckContext, pid: int) -> str:
    for line in (context.files.read(f"/proc/{pid}/status") or "").splitlines():
        if line.startswith("Uid:"):
            uid = int(line.split()[1])
            try:
                return pwd.getpwuid(uid).pw_name
            except KeyError:
                return str(uid)
    return "unknown"


CHECKS = (enough, alike, free_memory)
