"""Keeps this process, its threads and its memory on one NUMA node.

By the kernel's own calls, so no numactl is needed. What a container forbids is left out with a
warning, and what was set is read back: a binding that is silently not there costs half the memory
bandwidth, and nobody finds out.
"""

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from vcli.runtime.log import get_logger

logger = get_logger(__name__)

_MPOL_BIND = 2
_MAX_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_MASK = ctypes.c_ulong * (_MAX_NODES // _BITS)

#: Numbers of set_mempolicy and get_mempolicy; libc has no functions for them.
_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaEffect:
    """What is in force after a binding, as the kernel says."""

    has_cpus: bool
    has_memory: bool
    problems: tuple[str, ...] = ()


def bind_to_node(node: int, *, has_affinity: bool = False) -> NumaEffect:
    """Bind this thread, and all that it starts later, to the CPUs and the memory of `node`.

    With `has_affinity` the CPUs are chosen already. Never fails: what is not possible is logged as
    a warning, and the rest is done.
    """
    problems = []
    has_cpus = has_affinity
    if not has_affinity:
        problem = _bind_cpus(node)
        has_cpus = not problem
        problems.append(problem)
    problem = _bind_memory(node)
    has_memory = not problem
    problems.append(problem)
    effect = NumaEffect(
        has_cpus=has_cpus, has_memory=has_memory, problems=tuple(filter(None, problems))
    )
    for text in effect.problems:
        logger.warning("numa node=%s %s", node, text)
    logger.info("numa node=%s cpus=%s memory=%s", node, has_cpus, has_memory)
    return effect


def node_cpus(node: int) -> frozenset[int]:
    """CPUs of a node, whether or not this process may use them; empty where there is none."""
    path = Path(f"/sys/devices/system/node/node{node}/cpulist")
    try:
        return parse_cpu_list(path.read_text())
    except OSError:
        return frozenset()


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as the kernel writes it, as numbers."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _bind_cpus(node: int) -> str:
    """Gives what went wrong, or nothing."""
    wanted = node_cpus(node) & os.sched_getaffinity(0)
    if not wanted:
        return "not bound to its CPUs: this process may use none of them"
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        return f"not bound to its CPUs: {error}"
    if not os.sched_getaffinity(0) <= wanted:
        return "not bound to its CPUs: the kernel accepted it, and did nothing"
    return ""


def _bind_memory(node: int) -> str:
    """Gives what went wrong, or nothing."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None or not 0 <= node < _MAX_NODES:
        return f"memory not bound: not supported for {platform.machine()}"
    set_mempolicy, get_mempolicy = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = _MASK()
    wanted[node // _BITS] = 1 << (node % _BITS)
    # The kernel counts one bit less than it is told.
    if libc.syscall(set_mempolicy, _MPOL_BIND, wanted, ctypes.c_ulong(_MAX_NODES + 1)) != 0:
        reason = os.strerror(ctypes.get_errno())
        return f"memory not bound: {reason} (a container needs the capability SYS_NICE for it)"
    mode, found = ctypes.c_int(-1), _MASK()
    size = ctypes.c_ulong(_MAX_NODES + 1)
    failed = libc.syscall(get_mempolicy, ctypes.byref(mode), found, size, None, 0)
    if failed or mode.value != _MPOL_BIND or list(found) != list(wanted):
        return "memory not bound: the kernel accepted it, and did nothing"
    return ""
