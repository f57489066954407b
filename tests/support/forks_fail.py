"""Preloaded into a fork server: no process is to be had, as under RLIMIT_NPROC.

The limit itself does not hold for root, who often runs the tests.
"""

import errno
import os


def _fork() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


os.fork = _fork
