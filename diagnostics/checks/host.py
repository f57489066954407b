"""HOST: operating system, surroundings, name, memory."""

import re
from typing import Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.dialect import Dialect
from vcli.diagnostics.limits import CAP_SYS_PTRACE, has_capability
from vcli.diagnostics.sockets import is_loopback
from vcli.diagnostics.text import MIB, plural, size_text

OLDEST_GOOD_KERNEL: Final = (5, 5)

#: Resident memory of one rank's process with its libraries, without weights.
PROCESS_BYTES: Final = 512 * MIB
MEMORY_RESERVE: Final = 1.2


@check(
    "HOST-01",
    "operating system and kernel",
    why="older kernels let processes of a group hang at their end",
    expected="Linux 5.5 or newer",
    remedy=Remedy(
        bare_metal="upgrade the kernel and reboot: sudo apt-get install --upgrade linux-generic",
        docker="the kernel is the host's: upgrade it there",
        kubernetes="schedule the pod on nodes with a newer kernel "
        "(kubectl get nodes -o wide shows them)",
    ),
    is_preflight=True,
    is_headline=True,
)
def kernel(context: CheckContext) -> Finding:
    """Compares the platform and the kernel's version with what the process code relies on.

    Another system than Linux fails: the runtime needs memfd, pidfd and /proc.
    """
    host = context.host
    name = f"{host.platform} {host.kernel} on {host.machine}".replace("linux", "Linux", 1)
    if host.platform != "linux":
        return failed(
            name,
            remedy="run vcli on Linux, or in a Linux container or virtual machine",
            why="the runtime needs the kernel's memfd, pidfd and /proc",
        )
    match = re.match(r"(\d+)\.(\d+)", host.kernel)
    if match and (int(match[1]), int(match[2])) < OLDEST_GOOD_KERNEL:
        return warned(name)
    return passed(name)


@check(
    "HOST-02",
    "no Windows subsystem",
    why="under WSL a forked process cannot use the GPU, and GPUs cannot reach each other",
    expected="a Linux kernel of its own",
    remedy=Remedy(
        bare_metal="for speed use native Linux; here vcli starts workers by spawn, and "
        "NCCL_P2P_DISABLE=1 keeps NCCL off peer access",
    ),
)
def wsl(context: CheckContext) -> Finding:
    """Looks for Microsoft's name in the version of the kernel."""
    version = context.files.read("/proc/version") or ""
    if "microsoft" in version.lower() or context.host.is_wsl:
        return warned(f"WSL: {' '.join(version.split()[:3])}")
    return passed("no WSL")


@check(
    "HOST-03",
    "container and orchestrator",
    why="it decides where limits are set",
    expected="bare metal, a container, a pod or a Slurm job",
    remedy=Remedy(bare_metal="nothing to do: it selects how the other remedies are written"),
)
def surroundings(context: CheckContext) -> Finding:
    """Tells a pod, a container and a Slurm job from bare metal.

    Looks at KUBERNETES_SERVICE_HOST, SLURM_JOB_ID, the marker files of container engines and the
    control group of process 1. Remedies are written for what is found. Never fails.
    """
    dialect = context.dialect
    job = context.environ.get("SLURM_JOB_ID")
    if job and dialect is not Dialect.SLURM:
        return passed(f"{dialect.value}, in Slurm job {job}")
    return passed(f"Slurm job {job}" if dialect is Dialect.SLURM else dialect.value)


@check(
    "HOST-04",
    "own host name",
    why="gloo and torch tell the other nodes to connect to what this name resolves to",
    expected="an address of this host that the other nodes can reach",
    remedy=Remedy(
        bare_metal="echo '{address} {name}' | sudo tee -a /etc/hosts   (and remove the line that "
        "maps {name} to a loopback address), or export GLOO_SOCKET_IFNAME={interface}",
        docker="docker run --add-host {name}:{address} …, or -e GLOO_SOCKET_IFNAME={interface}",
        kubernetes="hostNetwork: true, or hostAliases with ip {address}; or env "
        "GLOO_SOCKET_IFNAME={interface}",
        slurm="export GLOO_SOCKET_IFNAME={interface} in the job script",
    ),
    deadline_s=1.8,
    is_preflight=True,
)
def own_name(context: CheckContext) -> Finding:
    """Resolves this host's name as the other side of a connection would be told it.

    It is bad with more than one node where it gives no address, only loopback ones, or only such
    as no interface of this host has. vcli names the interface toward node 0 to its ranks itself,
    so that this only warns, because of other launchers; it fails where that interface is not
    known. GLOO_SOCKET_IFNAME makes the name irrelevant.
    """
    if context.nnodes == 1:
        return skipped("one node: nobody else asks for this host's name")
    network = context.network
    name = network.host_name()
    chosen = context.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        return passed(f"GLOO_SOCKET_IFNAME={chosen} is used instead of the name {name}")
    found = network.addresses_of(name)
    outside = [address for address in found if not is_loopback(address)]
    if not found:
        problem = f"{name} does not resolve"
    elif not outside:
        problem = f"{name} resolves to {', '.join(found)}, which is loopback"
    elif not any(network.is_local(address) for address in outside):
        problem = f"{name} resolves to {', '.join(outside)}, which no interface of this host has"
    else:
        return passed(f"{name} is {', '.join(outside)}")
    address, interface = _own_address(context)
    values = {"name": name, "address": address or "ADDRESS", "interface": interface or "INTERFACE"}
    if not interface:
        return failed(f"{problem}, and no interface toward node 0 is known", values=values)
    return warned(f"{problem}; vcli uses {interface}, other launchers do not", values=values)


def _own_address(context: CheckContext) -> tuple[str, str]:
    """The address toward node 0 and its interface; empty where they are not known."""
    master = context.plan.config.master_addr
    toward = None if is_loopback(master) else context.network.address_toward(master)
    for nic in context.host.nics:
        usable = [item for item in nic.addresses if not is_loopback(item)]
        if nic.is_up and (toward in usable or (toward is None and usable)):
            return toward or usable[0], nic.name
    return toward or "", ""


@check(
    "HOST-05",
    "memory for the ranks of this node",
    why="a process above the limit is killed without a message (exit -9)",
    expected="free memory for weights on the CPU, processes and rings, and a fifth above that",
    remedy=Remedy(
        bare_metal="stop other programs, spread the ranks over more nodes (--nnodes), or name a "
        "smaller model",
        docker="docker run --memory {need} …   (or without --memory)",
        kubernetes="resources: limits: memory: {need}",
        slurm="#SBATCH --mem={need_slurm}",
    ),
    is_preflight=True,
    is_headline=True,
)
def memory(context: CheckContext) -> Finding:
    """Compares what the ranks of this node will take with what may still be taken.

    Taken: the rings, half a GiB for each process, and on the CPU the weights of each rank. Free is
    the smaller of MemAvailable and what every memory control group of this process leaves. Less
    than the need fails, less than 1.2 times the need warns.
    """
    usable = context.host.usable_memory_bytes
    if usable is None:
        return skipped("the system does not say how much memory is free")
    need, what = _memory_need(context)
    measured = f"{size_text(usable)} free"
    if need * MEMORY_RESERVE <= usable:
        return passed(measured)
    gib = int(need * MEMORY_RESERVE / 1024**3) + 1
    values = {
        "need": f"{gib}Gi" if context.dialect is Dialect.KUBERNETES else f"{gib}g",
        "need_slurm": f"{gib}G",
    }
    text = f"{measured}, {what} need {size_text(need)}"
    return failed(text, values=values) if need > usable else warned(text, values=values)


def _memory_need(context: CheckContext) -> tuple[int, str]:
    plan, ranks = context.plan, context.local_ranks
    node = plan.nodes[plan.config.own_node_rank] if plan.nodes else None
    need = len(ranks) * PROCESS_BYTES + (node.ring_bytes if node else 0)
    what = f"{plural(len(ranks), 'rank')} and their rings"
    if plan.memory is not None and not context.is_cuda:
        by_rank = {(item.dp_rank, item.rank): item.weight_bytes for item in plan.memory.ranks}
        need += sum(by_rank[rank.dp_rank, rank.rank] for rank in ranks)
        what = f"the weights of {what}"
    return need, what


@check(
    "HOST-06",
    "no process killed for memory",
    why="an earlier exit with -9 was the memory limit, not a crash",
    expected="no kill since this control group began",
    remedy=Remedy(
        bare_metal="give the group more: systemctl set-property UNIT MemoryMax=…, or use less",
        docker="docker run --memory SIZE …   (larger than now)",
        kubernetes="raise resources.limits.memory   (kubectl describe pod shows OOMKilled)",
        slurm="#SBATCH --mem=…   (larger than now)",
    ),
)
def oom_history(context: CheckContext) -> Finding:
    """Reads how often the kernel killed a process of the own memory control group.

    Only a group of its own is judged: the counter of the whole host would blame strangers.
    """
    groups = (context.files.read("/proc/self/cgroup") or "").splitlines()
    own = [line.rsplit(":", 1)[-1] for line in groups if ":memory:" in line or line[:3] == "0::"]
    is_own = any(path not in ("", "/") for path in own) or context.dialect in (
        Dialect.DOCKER,
        Dialect.KUBERNETES,
    )
    if not is_own:
        return skipped("no memory control group of its own")
    kills = context.cgroups.oom_kills()
    if kills is None:
        return skipped("the memory control group does not count kills")
    if kills:
        return warned(f"{kills} killed for memory")
    return passed("none killed")


@check(
    "HOST-10",
    "stacks of other processes",
    level=Level.L0,
    why="it decides what can be shown about a hang",
    expected="py-spy on PATH, and the right to look into other processes",
    remedy=Remedy(
        bare_metal="pip install py-spy; sudo sysctl kernel.yama.ptrace_scope=0",
        docker="docker run --cap-add SYS_PTRACE …",
        kubernetes="securityContext: capabilities: add: [SYS_PTRACE]",
    ),
)
def debugging(context: CheckContext) -> Finding:
    """Says whether the stacks of hung processes can be taken from outside. Never fails.

    Python's own dump (faulthandler) works without any right.
    """
    scope = context.files.read_int("/proc/sys/kernel/yama/ptrace_scope") or 0
    may_trace = scope == 0 or has_capability(context.files, CAP_SYS_PTRACE)
    own = "of any own process" if may_trace else f"of children only (ptrace_scope={scope})"
    return passed(f"stacks {own}; Python's own dump always works")


CHECKS = (kernel, wsl, surroundings, own_name, memory, oom_history, debugging)
