"""Waiting for the end of processes, whoever's children they are."""

import contextlib
import os
import select
import time
from collections.abc import Iterable


def seconds_until_all_ended(pids: Iterable[int], timeout_s: float) -> float:
    """How long it took until the last of them ended; raises naming those that still run."""
    begin_s = time.monotonic()
    waiting: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            waiting[os.pidfd_open(pid)] = pid
    poller = select.poll()
    for descriptor in waiting:
        poller.register(descriptor, select.POLLIN)
    try:
        while waiting:
            left_s = begin_s + timeout_s - time.monotonic()
            ready = poller.poll(max(0.0, left_s) * 1000)
            if not ready:
                raise AssertionError(f"still run after {timeout_s} s: {list(waiting.values())}")
            for descriptor, _ in ready:
                poller.unregister(descriptor)
                del waiting[descriptor]
                os.close(descriptor)
        return time.monotonic() - begin_s
    finally:
        for descriptor in waiting:
            os.close(descriptor)
