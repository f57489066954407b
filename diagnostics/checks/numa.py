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
    "NUMA-02",
    "each rank may use the CPUs of its GPU",
    level=Level.L1,
    why="a rank that is bound to a NUMA node without an allowed CPU cannot start",
    expected="an allowed CPU on the NUMA node of each GPU, with --numa-bind",
    remedy=_CPUSET,
    is_preflight=True,
)
def gpu_affinity(context: CheckContext) -> Finding:
    """With --numa-bind, compares the nodes that the ranks are bound to with the allowed CPUs."""
    if not context.plan.config.numa_bind:
        return skipped("no --numa-bind")
    nodes, allowed = context.host.numa_cpus, context.affinity()
    bound = {rank.rank: rank.bound_numa_node for rank in context.local_ranks}
    closed = {
        rank: node
        for rank, node in bound.items()
        if node is not None and node < len(nodes) and not allowed & set(nodes[node])
    }
    if closed:
        cpus = ",".join(_ranges(nodes[node]) for node in sorted(set(closed.values())))
        text = listing([f"rank {rank} on NUMA node {node}" for rank, node in closed.items()])
        return failed(f"no allowed CPU for {text}", values={"cpus": cpus})
    known = sum(node is not None for node in bound.values())
    return passed(f"{known} of {plural(len(bound), 'rank')} bound")


@check(
    "NUMA-03",
    "memory can be bound to a node",
    why="without the right, pages may lie on the other socket in spite of --numa-bind",
    expected="set_mempolicy is allowed, with --numa-bind",
    remedy=Remedy(
        bare_metal="start outside of the sandbox that forbids it, or leave out --numa-bind",
        docker="docker run --cap-add SYS_NICE …   (or --security-opt seccomp=unconfined)",
        kubernetes="securityContext: capabilities: add: [SYS_NICE]",
    ),
    is_preflight=True,
)
def memory_policy(context: CheckContext) -> Finding:
    """Binds the memory of the check's own thread to node 0 and takes it back.

    Not allowed fails with --numa-bind; without it, it is only said.
    """
    code = context.memory_policy()
    if code is None:
        return skipped("this system has no set_mempolicy")
    if code == 0:
        return passed("allowed")
    text = f"set_mempolicy: {os.strerror(code)}"
    return failed(text) if context.plan.config.numa_bind else passed(f"{text}; not needed")


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


@check(
    "NUMA-08",
    "threads beside others",
    why="every operator waits for the thread that has no CPU, and the others spin meanwhile: a "
    "step takes several times as long as with fewer threads",
    expected="a CPU for each thread of the ranks beside what runs already",
    remedy=Remedy(
        bare_metal="export OMP_NUM_THREADS={threads}   (or stop what else runs)",
        docker="docker run -e OMP_NUM_THREADS={threads} …   (or stop what else runs)",
        kubernetes='env OMP_NUM_THREADS: "{threads}"   (or CPUs of its own: requests = limits)',
        slurm="export OMP_NUM_THREADS={threads}   in the job script",
    ),
)
def shared_cpus(context: CheckContext) -> Finding:
    """Adds the load average to the threads of ranks that compute on the CPU.

    The smaller of the last minute's and the last five minutes' counts, from one on: what ended is
    not held against a start, nor what has just begun. Ranks with one thread pass: no thread waits
    for another.
    """
    if context.is_cuda:
        return skipped("planned for GPUs")
    ranks, cpus = len(context.local_ranks), context.host.cpu_count
    machine = sum(map(len, context.host.numa_cpus))
    if machine > cpus:
        return skipped(f"{cpus} of {machine} CPUs may be used: the load average is of all")
    each = context.plan.omp_num_threads.value
    value = context.environ.get("OMP_NUM_THREADS", "")
    each = int(value[:9]) if value.isdecimal() and int(value[:9]) else each
    if each == 1:
        return passed("one thread for each rank")
    try:
        load = min(map(float, context.files.read_words("/proc/loadavg")[:2]))
    except ValueError:  # also without any
        return skipped("the system does not say its load average")
    if load < 1 or load + ranks * each <= cpus:
        return passed("room for all threads")
    return warned(
        f"load average {load:.0f} beside {plural(ranks, 'rank')} with OMP_NUM_THREADS={each} on "
        f"{plural(cpus, 'CPU')}",
        values={"threads": max(1, int(cpus - load) // max(1, ranks))},
    )


CHECKS = (layout, gpu_affinity, memory_policy, numactl, quota, threads, balancing, shared_cpus)
