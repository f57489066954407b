"""Memory fences between processes that share a mapping; what `ring` builds its order on.

The words of the ring are read and written through a `memoryview` cast to `Q`. CPython copies such
an item with a constant eight-byte memcpy, which 64-bit compilers turn into one load or store; an
aligned one is never seen torn. What is left to guarantee is the order in which another CPU sees
several of them:

- x86-64 keeps stores in order among stores, and loads among loads (glibc ends its non-temporal
  large copies with `sfence`). Only a store followed by a load of another word can be swapped; a
  locked instruction between them forbids it, and an uncontended `threading.Lock` is one
  (`lock cmpxchg`, whatever its address).
- Every other CPU may swap anything. There each fence is the system call
  `membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)` with both sides registered: the kernel promises
  that two such calls order the accesses around them, as two full barriers do. A lock would not do:
  acquire and release let a store and a later load pass each other between them.
"""

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass

from vcli.topology.errors import UnfitError

_MEMBARRIER_NUMBERS = {
    "x86_64": 324,
    "ppc64le": 365,
    "s390x": 356,
    "aarch64": 283,
    "riscv64": 283,
    "loongarch64": 283,
}
_MEMBARRIER_GLOBAL_EXPEDITED = 1 << 1
_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED = 1 << 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fences:
    """The fences of one process.

    `order` keeps everything but store-before-load: loads and stores before it are seen before
    stores after it, and loads before it are done before loads after it. None where the CPU does
    that by itself. `full` also keeps a store before a later load.
    """

    order: Callable[[], None] | None
    full: Callable[[], None]


def make_fences(machine: str | None = None) -> Fences:
    """The fences for this CPU, or as for `machine` (a name as `platform.machine()` has it).

    Raises:
        UnfitError: a weakly ordered CPU, and the kernel refuses membarrier.
    """
    name = platform.machine() if machine is None else machine
    if name == "x86_64":
        return Fences(order=None, full=_locked_instruction())
    barrier = _membarrier()
    return Fences(order=barrier, full=barrier)


def _locked_instruction() -> Callable[[], None]:
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def full_fence() -> None:
        acquire()
        release()

    return full_fence


def _membarrier() -> Callable[[], None]:
    # Numbered by the machine that runs, whichever order was asked for.
    number = _MEMBARRIER_NUMBERS.get(platform.machine())
    if number is None:
        raise UnfitError(f"vcli does not know the memory barrier of a {platform.machine()} CPU")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long)

    def command(value: int) -> None:
        if syscall(number, value, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise UnfitError(
                f"the kernel refuses membarrier command {value}: {reason}",
                hint="allow the membarrier system call in the container's seccomp profile",
            )

    def full_fence() -> None:
        command(_MEMBARRIER_GLOBAL_EXPEDITED)

    command(_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED)
    return full_fence
