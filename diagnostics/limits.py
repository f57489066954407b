"""Resource limits of this process, as the kernel lists them in /proc/self/limits."""

import resource
from dataclasses import dataclass

from vcli.diagnostics.files import HostFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A soft and a hard limit; None is unlimited."""

    soft: int | None
    hard: int | None


OPEN_FILES = "Max open files"
PROCESSES = "Max processes"
LOCKED_MEMORY = "Max locked memory"

#: Numbers of capabilities.
CAP_IPC_LOCK = 14
CAP_SYS_PTRACE = 19
CAP_SYS_RESOURCE = 24

#: Descriptors that the front end may need, and more for each rank on this node.
BASE_OPEN_FILES = 1024
OPEN_FILES_PER_RANK = 64


def open_files_needed(num_local_ranks: int) -> int:
    """Descriptors that the processes of one node need."""
    return BASE_OPEN_FILES + OPEN_FILES_PER_RANK * num_local_ranks


def read_limit(files: HostFiles, name: str) -> Limit | None:
    """The limit of this name; None where the kernel does not list it."""
    for line in (files.read("/proc/self/limits") or "").splitlines():
        if line.startswith(name):
            words = line[len(name) :].split()
            if len(words) >= 2:
                return Limit(soft=_number(words[0]), hard=_number(words[1]))
    return None


def has_capability(files: HostFiles, bit: int) -> bool:
    """Whether the capability with this number is in effect for this process."""
    for line in (files.read("/proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value.strip(), 16) >> bit & 1)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqLimits:
    """What the installed libzmq can do: sockets of one context, and encryption."""

    version: str
    max_sockets: int
    has_curve: bool


def read_zmq_limits() -> ZmqLimits | None:
    """Ask libzmq; None if pyzmq is not installed."""
    try:
        import zmq
    except ImportError:
        return None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        # What is asked for is the ceiling for good: the library's own is set by its build.
        limit = min(int(context.get(zmq.MAX_SOCKETS)), int(context.get(zmq.SOCKET_LIMIT)))
        return ZmqLimits(
            version=zmq.zmq_version(), max_sockets=limit, has_curve=bool(zmq.has("curve"))
        )
    finally:
        context.term()


def raise_open_files(need: int) -> str:
    """Raise the soft limit of open files of this process to `need`; says what it did, or "".

    Children inherit it. Nothing is lowered, and the hard limit is never touched.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = need if hard == resource.RLIM_INFINITY else min(need, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return f"soft limit of open files raised from {soft} to {wanted}"


def _number(word: str) -> int | None:
    return int(word) if word.isdigit() else None
