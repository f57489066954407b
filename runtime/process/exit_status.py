"""How a process ended, asked of the kernel by one that is not its parent.

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
