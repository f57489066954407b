"""Waiting for the end of processes, whoever's children they are."""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path


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


def wait_until(claim: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return as soon as the claim is true; for what no descriptor tells."""
    end_s = time.monotonic() + timeout_s
    while not claim():
        if time.monotonic() > end_s:
            raise AssertionError(f"not true within {timeout_s} s")
        time.sleep(0.01)


def opened_files(pid: int) -> list[str]:
    """What the descriptors of a live process point to; one that it closes meanwhile is left out."""
    targets = []
    for path in list(Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            targets.append(str(path.readlink()))
    return targets


def opened_devices(pid: int) -> list[str]:
    """The NVIDIA devices that a process has open: it has initialised CUDA, or asked for a GPU."""
    return [target for target in opened_files(pid) if target.startswith("/dev/nvidia")]
