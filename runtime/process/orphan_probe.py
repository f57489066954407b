"""A self-test of the lifelines: does everything end when a process in the middle is killed?

    tester --starts--> engine --starts--> two workers
    tester --SIGKILL--> engine: the workers must be gone within the deadline

The children are real ones with real lifelines, without torch and without a device.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.child import ChildContext, ChildSpec
from vcli.runtime.process.group import ChildGroup

NUM_WORKERS = 2
#: A killed process leaves at once, unless the kernel holds it.
_KILL_WAIT_S = 2.0
_MODULE = "vcli.runtime.process.orphan_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanReport:
    """`survivors` are pids that lived on after `seconds`; they are killed before this is given."""

    num_workers: int
    survivors: tuple[int, ...]
    seconds: float


def run_orphan_probe(
    *, start_deadline_s: float = 10.0, end_deadline_s: float = 3.0
) -> OrphanReport:
    """Start an engine with two workers, kill the engine, and watch the workers end.

    Blocks, for about a second. Nothing is left behind, whatever the outcome.

    Raises:
        StartupError: the children did not start.
    """
    group = ChildGroup(on_message=_ignore, on_failure=_ignore)
    try:
        group.start([_spec("engine_main", "OrphanTest_Engine")])
        worker_pids = group.wait_ready(start_deadline_s)[0]
        return _kill_and_watch(group.pids[0], worker_pids, end_deadline_s)
    finally:
        group.shutdown(1.0, asked=False)


def engine_main(context: ChildContext) -> None:
    """The engine of the test: starts the workers, tells their pids, and waits to be killed."""
    workers = ChildGroup(on_message=_ignore, on_failure=_ignore)
    workers.start(
        [_spec("worker_main", f"OrphanTest_Worker_{index}") for index in range(NUM_WORKERS)]
    )
    workers.wait_ready(10.0)
    context.ready(list(workers.pids))
    threading.Event().wait()


def worker_main(context: ChildContext) -> None:
    """A worker of the test: waits until its lifeline ends it."""
    context.ready()
    threading.Event().wait()


def _kill_and_watch(
    engine_pid: int, worker_pids: Sequence[int], end_deadline_s: float
) -> OrphanReport:
    watched = {os.pidfd_open(pid): pid for pid in worker_pids}
    begin_s = time.monotonic()
    try:
        os.kill(engine_pid, signal.SIGKILL)
        survivors = _wait_ended(dict(watched), begin_s + end_deadline_s)
        seconds = time.monotonic() - begin_s
        for descriptor in survivors:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        _wait_ended({descriptor: watched[descriptor] for descriptor in survivors},
                    time.monotonic() + _KILL_WAIT_S)  # fmt: skip
        return OrphanReport(
            num_workers=len(worker_pids),
            survivors=tuple(watched[descriptor] for descriptor in survivors),
            seconds=seconds,
        )
    finally:
        for descriptor in watched:
            os.close(descriptor)


def _wait_ended(running: dict[int, int], end_s: float) -> tuple[int, ...]:
    """The descriptors of those that are still there at `end_s`."""
    poller = select.poll()
    for descriptor in running:
        poller.register(descriptor, select.POLLIN)
    while running:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            break
        for descriptor, _ in poller.poll(left_s * 1000):
            poller.unregister(descriptor)
            del running[descriptor]
    return tuple(running)


def _spec(function: str, title: str) -> ChildSpec:
    return ChildSpec(
        target=f"{_MODULE}:{function}", arguments=(), title=title, log_level="CRITICAL"
    )


def _ignore(message: ChildMessage | object) -> None:
    del message
