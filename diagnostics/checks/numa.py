"""NUMA: CPUs, memory nodes and threads for the ranks of this node."""

import os
import shutil
from typing import Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.text import listing, plural

#: Engine core and API server beside the ranks.
OTHER_BUSY_PROCESSES: Final = 2

_CPUSET: Final = Remedy(
    bare_metal="taskset -c {cpus} vcli …",
    docker="docker run --cpuset-cpus {cpus} …",
    kubernetes="the kubelet's cpuManagerPolicy: static with topologyManagerPolicy: best-effort",
    slurm="srun --cpu-bind=none …   (or #SBATCH --cpus-per-task with cores of both sockets)",
)


@check(
    "NUMA-01",
    "CPUs near every GPU",
    why="ranks whose GPU hangs on the other socket go through the link between the sockets",
    expected="allowed CPUs on each NUMA node that has a GPU of the plan",
    remedy=_CPUSET,
    is_headline=True,
)
def layout(context: CheckContext) -> Finding:
    """Compares the CPUs that this process may use with the NUMA nodes of the GPUs."""
    nodes = context.host.numa_cpus
    allowed = context.affinity()
    text = f"{plural(context.host.cpu_count, 'CPU')} on {plural(max(1, len(nodes)), 'NUMA node')}"
    if not nodes:
        return passed(text)
    usable = {index for index, cpus in enumerate(nodes) if allowed & set(cpus)}
    wanted = {gpu.numa_node for gpu in context.gpus if gpu.numa_node is not None}
    far = sorted(wanted - usable)
    if far:
        cpus = ",".join(_ranges(nodes[index]) for index in sorted(wanted) if index < len(nodes))
        return warned(
            f"no allowed CPU on NUMA node {listing([str(index) for index in far])}, where GPUs are",
            values={"cpus": cpus or "ALL"},
        )
    return passed(text)


def _ranges(cpus: tuple[int, ...]) -> str:
    parts: list[str] = []
    begin = previous = None
    for cpu in (*sorted(cpus), None):
        if previous is not None and cpu == previous + 1:
            previous = cpu
            continue
        if begin is not None:
            parts.append(str(begin) if begin == previous else f"{begin}-{previous}")
        begin = previous = cpu
    return ",".join(parts)


@check(
    "NUMA-04",
    "numactl",
    why="a launch script that calls it ends at once without it",
    expected="numactl on PATH where NUMACTL or a script of yours uses it",
    remedy=Remedy(
        bare_metal="sudo apt-get install numactl   (vcli itself does not need it)",
        docker="in the image: RUN apt-get install -y numactl",
    ),
)
def numactl(context: CheckContext) -> Finding:
    """Looks for numactl where the plan binds to NUMA nodes; vcli's own binding needs no program."""
    if not context.process.numa_bind:
        return skipped("no NUMA binding")
    found = shutil.which("numactl", path=context.environ.get("PATH", os.defpath))
    return passed(found) if found else failed("numactl is not on PATH")


@check(
    "NUMA-05",
    "CPUs for the processes",
    why="processes that share a CPU take turns, and every step waits for the last one",
    expected="a CPU for each rank, the engine core and the API server, where there is a quota",
    remedy=Remedy(
        bare_metal="systemctl set-property UNIT CPUQuota={percent}%   (or start outside of it)",
        docker="docker run --cpus {need} …",
        kubernetes='resources: limits: cpu: "{need}"',
        slurm="#SBATCH --cpus-per-task={need}",
    ),
)
def quota(context: CheckContext) -> Finding:
    """Compares the CPU quota of the control groups with the ranks of this node.

    Warns only where a quota is below the CPUs of the host and below the need; less than one CPU
    fails.
    """
    limit = context.cgroups.cpu_quota()
    if limit is None:
        return passed("no quota")
    cpus = len(context.affinity())
    need = len(context.local_ranks) + OTHER_BUSY_PROCESSES
    values = {"need": need, "percent": need * 100}
    if limit < 1:
        return failed(f"{limit:g} CPUs", expected="at least one CPU", values=values)
    if limit < min(need, cpus):
        return warned(f"{limit:g} CPUs for {need} busy processes", values=values)
    return passed(f"{limit:g} CPUs")


@check(
    "NUMA-06",
    "threads of each rank",
    why="more threads than CPUs take turns within every operator",
    expected="OMP_NUM_THREADS times the ranks here within the usable CPUs, or not set",
    remedy=Remedy(
        bare_metal="export OMP_NUM_THREADS={threads}   (or unset it: vcli chooses {threads})",
        docker="docker run -e OMP_NUM_THREADS={threads} …   (or leave it out)",
        kubernetes='env OMP_NUM_THREADS: "{threads}"   (or leave it out)',
        slurm="export OMP_NUM_THREADS={threads}   in the job script",
    ),
)
def threads(context: CheckContext) -> Finding:
    """Multiplies OMP_NUM_THREADS with the ranks of this node."""
    ranks, cpus = len(context.local_ranks), context.host.cpu_count
    value = context.environ.get("OMP_NUM_THREADS", "")
    own = max(1, cpus // max(1, ranks))
    if not value.isdigit() or int(value) < 1:
        return passed(f"vcli sets {context.plan.omp_num_threads.value} for each rank")
    total = int(value) * ranks
    if int(value) > 1 and total > cpus:
        return warned(
            f"OMP_NUM_THREADS={value} for {plural(ranks, 'rank')} on {plural(cpus, 'CPU')}",
            values={"threads": own},
        )
    return passed(f"OMP_NUM_THREADS={value}")


@check(
    "NUMA-07",
    "no automatic NUMA balancing",
    level=Level.L0,
    why="the kernel moves pages between nodes and stops processes for it",
    expected="kernel.numa_balancing = 0 on machines with several NUMA nodes",
    remedy=Remedy(
        bare_metal="sudo sysctl kernel.numa_balancing=0",
        docker="on the host: sudo sysctl kernel.numa_balancing=0",
    ),
)
def balancing(context: CheckContext) -> Finding:
    """Reads the kernel's switch, where there is more than one NUMA node and ranks use GPUs."""
    if len(context.host.numa_cpus) < 2:
        return skipped("one NUMA node")
    if context.files.read_int("/proc/sys/kernel/numa_balancing") and context.gpus:
        return warned("kernel.numa_balancing = 1")
    return passed("off, or no GPU")


CHECKS = (layout, numactl, quota, threads, balancing)
