"""How a process ended, asked of the kernel by any other process.

Linux keeps the status in the pidfd after the parent has reaped the process (since 6.15).
"""

import fcntl
import os
import select
import struct

#: PIDFD_GET_INFO: _IOWR(0xFF, 11, 64 bytes), see linux/pidfd.h.
_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_INFO_EXIT = 1 << 3
#: mask, cgroup id, pid, tgid, ppid, eight user and group ids, exit status.
_INFO = struct.Struct("=QQIII8Ii")


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended, whoever's child it is."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def kernel_exit_code(pidfd: int) -> int | None:
    """The exit code (negative: a signal) of a reaped process; None where the kernel can't tell."""
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _INFO_EXIT, *[0] * 13)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return os.waitstatus_to_exitcode(status) if mask & _INFO_EXIT else None


def exit_code_of(pidfd: int) -> int | None:
    """The exit code of a process that has ended, which stays to be reaped by its parent.

    Only the parent knows it before that, and the kernel tells it to others after; else None.
    """
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return kernel_exit_code(pidfd)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
