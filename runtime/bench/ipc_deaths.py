"""How soon one end of the queue knows that the process at the other end was killed.

    reader dies   the writer waits for space: its reader is stopped, the ring is full
    writer dies   a reader waits for a record

Each time two new processes: this one, and the one that gets SIGKILL while this one waits.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from vcli.runtime.bench.ipc import IpcBenchSpec, QueueBench
from vcli.runtime.bench.stats import Summary
from vcli.runtime.ipc.errors import PeerDiedError

#: Enough to be asleep in the kernel when the other one dies.
_ASLEEP_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathRow:
    """`named_ms`: from SIGKILL to the error with the pid, and the index of a reader, that died."""

    killed: Literal["reader", "writer"]
    named_ms: Summary


def run_death_bench(spec: IpcBenchSpec) -> Generator[DeathRow, None, None]:
    """A row for each end, if there are kills; closing the iterator ends the processes.

    Raises:
        PeerDiedError, QueueTimeout: another process died, or none was named.
    """
    if spec.kills:
        times_ms = [_kill_reader(spec) for _ in range(spec.kills)]
        yield DeathRow(killed="reader", named_ms=Summary.of(times_ms))
        times_ms = [_kill_writer(spec) for _ in range(spec.kills)]
        yield DeathRow(killed="writer", named_ms=Summary.of(times_ms))


def _kill_reader(spec: IpcBenchSpec) -> float:
    bench = QueueBench(1, spec)
    try:
        bench.wait_ready()
        bench.fill()
        return _named_ms(bench.pids[0], 0, bench.push)
    finally:
        bench.close()


def _kill_writer(spec: IpcBenchSpec) -> float:
    bench = QueueBench(1, spec)
    try:
        bench.wait_ready()
        return _named_ms(bench.pids[0], None, bench.wait_reply)
    finally:
        bench.close()


def _named_ms(pid: int, reader_index: int | None, wait: Callable[[], None]) -> float:
    """Kill `pid` while `wait` waits; milliseconds until it raised."""
    killed_ns: list[int] = []

    def kill() -> None:
        killed_ns.append(time.monotonic_ns())
        os.kill(pid, signal.SIGKILL)

    killer = threading.Timer(_ASLEEP_S, kill)
    killer.start()
    try:
        wait()
    except PeerDiedError as error:
        named_ns = time.monotonic_ns()
        if not killed_ns or (error.pid, error.reader_index) != (pid, reader_index):
            raise
        return (named_ns - killed_ns[0]) / 1e6
    finally:
        killer.join()
    raise AssertionError("a killed process has sent or taken a message")
