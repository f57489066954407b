"""Whether this process may bind its memory to a NUMA node."""

import ctypes
import platform
from typing import Final

_MPOL_DEFAULT: Final = 0
_MPOL_BIND: Final = 2
#: Number of set_mempolicy(2).
_SYSCALLS: Final = {"x86_64": 238, "aarch64": 237}


def memory_policy_errno() -> int | None:
    """The error of binding to node 0, 0 if it is allowed; None where the call is not known.

    The policy is that of the calling thread alone, and is taken back at once.
    """
    number = _SYSCALLS.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(1)
    if libc.syscall(number, _MPOL_BIND, ctypes.byref(mask), 8 * ctypes.sizeof(mask)):
        return ctypes.get_errno()
    libc.syscall(number, _MPOL_DEFAULT, None, 0)
    return 0
