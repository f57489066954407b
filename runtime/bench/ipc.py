"""Latency, throughput and CPU of the broadcast queue, between real processes of this machine.

The rings are as the executor makes them: one to all readers, one back from each.
"""

import array
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import msgspec

from vcli.runtime.bench.ipc_messages import HEADER, Kind, ReaderLinks
from vcli.runtime.bench.stats import Summary, cpu_seconds
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.errors import QueueFullTimeout
from vcli.topology.errors import ConfigError

_CALL_RING_BYTES = 32 << 20
_REPLY_RING_BYTES = 1 << 20
_DEADLINE_S = 60.0
_MAX_READERS = 64
_MAX_PAYLOAD_BYTES = 1 << 30
_MAX_KILLS = 1000
_MIN_SECONDS = 0.01
_NUM_WARM_UP = 20
_PUSHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcBenchSpec:
    """What to measure: each payload at each number of readers, `seconds` for each figure.

    `gap_s` is the pause between two messages where they are paced, `kills` how often a process is
    killed at either end; see `ipc_deaths`.

    Raises:
        ConfigError: a number out of range.
    """

    readers: tuple[int, ...]
    payloads_bytes: tuple[int, ...]
    seconds: float = 0.5
    gap_s: float = 0.002
    kills: int = 10

    def __post_init__(self) -> None:
        wrong = [str(count) for count in self.readers if not 1 <= count <= _MAX_READERS]
        if wrong or not self.readers:
            raise ConfigError(
                f"--readers {','.join(wrong)}: 1 to {_MAX_READERS} readers", hint="--readers 1,2,4"
            )
        large = [str(n) for n in self.payloads_bytes if not 0 <= n <= _MAX_PAYLOAD_BYTES]
        if large or not self.payloads_bytes:
            raise ConfigError(
                f"--payload {','.join(large)}: 0 bytes to 1 GiB", hint="--payload 100,64K,8M"
            )
        if not _MIN_SECONDS <= self.seconds <= 600:
            raise ConfigError(
                f"--seconds {self.seconds:g}: {_MIN_SECONDS:g} to 600", hint="--seconds 0.5"
            )
        if not 0 <= self.gap_s <= 10:
            raise ConfigError(f"--pace-ms {self.gap_s * 1e3:g}: 0 to 10000", hint="--pace-ms 2")
        if not 0 <= self.kills <= _MAX_KILLS:
            raise ConfigError(f"--kills {self.kills}: 0 to {_MAX_KILLS}", hint="--kills 10")


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcBenchRow:
    """Figures for one number of readers and one payload.

    `round_trip_us`: send to all, reply of reader 0, one after the other. `one_way_us`: paced, until
    the last reader has it; `writer_cpu_us` and `reader_cpu_us` are CPU per message meanwhile.
    `messages_per_s` and `bytes_per_s`: as fast as all readers take them. `idle_cpu_s`: of one
    reader in the `idle_s` seconds after the last message.
    """

    readers: int
    payload_bytes: int
    round_trip_us: Summary
    one_way_us: Summary
    writer_cpu_us: float
    reader_cpu_us: float
    messages_per_s: float
    bytes_per_s: float
    idle_cpu_s: float
    idle_s: float


def run_ipc_bench(spec: IpcBenchSpec) -> Generator[IpcBenchRow, None, None]:
    """Row after row; closing the iterator ends the processes.

    Raises:
        PeerDiedError, QueueTimeout: a reader process died or hangs.
    """
    for num_readers in spec.readers:
        bench = QueueBench(num_readers, spec)
        try:
            bench.wait_ready()
            for payload_bytes in spec.payloads_bytes:
                yield bench.measure(payload_bytes)
        finally:
            bench.close()


class QueueBench:
    """One queue, its reader processes, and the writer's side of every measurement."""

    def __init__(self, num_readers: int, spec: IpcBenchSpec) -> None:
        self._spec = spec
        self._calls = BroadcastWriter.create(num_readers, _CALL_RING_BYTES, "bench")
        self._replies: list[BroadcastReader] = []
        self._children: list[subprocess.Popen[bytes]] = []
        for index in range(num_readers):
            reader, writer = BroadcastReader.create(_REPLY_RING_BYTES, f"bench-r{index}")
            self._replies.append(reader)
            links = ReaderLinks(calls=self._calls.reader_handle(index), replies=writer)
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vcli.runtime.bench.ipc_reader",
                    msgspec.json.encode(links).decode(),
                ],
                pass_fds=links.fds(),
                stdin=subprocess.DEVNULL,
            )
            self._children.append(child)
            self._calls.set_reader_pid(index, child.pid)
            reader.set_writer_pid(child.pid)

    def wait_ready(self) -> None:
        """Return when every reader is there and has answered."""
        self._calls.handshake(_DEADLINE_S)
        self._report()

    @property
    def pids(self) -> list[int]:
        """The reader processes."""
        return [child.pid for child in self._children]

    def fill(self) -> None:
        """Stop the readers and leave no space for another message of `push`."""
        for child in self._children:
            child.send_signal(signal.SIGSTOP)
        message = _pushed()
        with contextlib.suppress(QueueFullTimeout):
            while True:
                self._calls.send(message, 0.0)

    def push(self) -> None:
        """Send a large message, once there is space."""
        self._calls.send(_pushed(), _DEADLINE_S)

    def wait_reply(self) -> None:
        """Wait for a message of the first reader process."""
        self._replies[0].recv(_DEADLINE_S)

    def close(self) -> None:
        """End the processes; they have a moment to leave by themselves."""
        self._calls.close()
        for child in self._children:
            try:
                child.wait(2.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for reader in self._replies:
            reader.close()

    def measure(self, payload_bytes: int) -> IpcBenchRow:
        """All figures for one payload."""
        payload = os.urandom(min(payload_bytes, 1 << 20)) * max(1, -(-payload_bytes >> 20))
        payload = payload[:payload_bytes]
        for _ in range(_NUM_WARM_UP):
            self._call(payload)
        trips = self._round_trips(payload)
        one_way, writer_cpu_us, reader_cpu_us = self._paced(payload)
        messages_per_s = self._throughput(payload)
        return IpcBenchRow(
            readers=len(self._children),
            payload_bytes=payload_bytes,
            round_trip_us=Summary.of(trips),
            one_way_us=Summary.of(one_way),
            writer_cpu_us=writer_cpu_us,
            reader_cpu_us=reader_cpu_us,
            messages_per_s=messages_per_s,
            bytes_per_s=messages_per_s * payload_bytes,
            idle_cpu_s=self._idle(),
            idle_s=self._spec.seconds,
        )

    def _round_trips(self, payload: bytes) -> list[float]:
        trips, now_ns = [], time.monotonic_ns
        for began_ns in self._clock():
            self._call(payload)
            trips.append((now_ns() - began_ns) / 1e3)
        return trips

    def _paced(self, payload: bytes) -> tuple[list[float], float, float]:
        """Latencies until the last reader, and CPU microseconds per message, writer and reader."""
        count, readers_s, writer_s = 0, self._readers_cpu_s(), time.process_time()
        for began_ns in self._clock():
            self._send(Kind.STAMP, payload, began_ns)
            count += 1
            time.sleep(self._spec.gap_s)
        writer_cpu_us = (time.process_time() - writer_s) / count * 1e6
        noted = self._report()
        reader_cpu_us = (self._readers_cpu_s() - readers_s) / len(noted) / count * 1e6
        latest = [max(times) / 1e3 for times in zip(*noted, strict=True)]
        return latest, writer_cpu_us, reader_cpu_us

    def _throughput(self, payload: bytes) -> float:
        """Messages per second, until all readers have had all of them."""
        count, began_ns = 0, time.monotonic_ns()
        for _ in self._clock():
            self._send(Kind.PUSH, payload)
            count += 1
        self._report()
        return count / ((time.monotonic_ns() - began_ns) / 1e9)

    def _idle(self) -> float:
        """CPU seconds of one reader while nothing is sent."""
        before_s = self._readers_cpu_s()
        time.sleep(self._spec.seconds)
        return (self._readers_cpu_s() - before_s) / len(self._children)

    def _clock(self) -> Iterator[int]:
        """The time, again and again for as long as one figure may take; at least once."""
        began_ns = now = time.monotonic_ns()
        while True:
            yield now
            now = time.monotonic_ns()
            if now - began_ns >= self._spec.seconds * 1e9:
                return

    def _call(self, payload: bytes) -> None:
        self._send(Kind.CALL, payload)
        self._replies[0].recv(_DEADLINE_S)

    def _send(self, kind: Kind, payload: bytes, sent_ns: int = 0) -> None:
        self._calls.send([HEADER.pack(kind, sent_ns), payload], _DEADLINE_S)

    def _report(self) -> "list[array.array[int]]":
        """What each reader noted; all of them have read everything then."""
        self._send(Kind.REPORT, b"")
        noted = []
        for reader in self._replies:
            times = array.array("q")
            times.frombytes(reader.recv(_DEADLINE_S)[0])
            reader.release()
            noted.append(times)
        return noted

    def _readers_cpu_s(self) -> float:
        return sum(cpu_seconds(child.pid) for child in self._children)


def _pushed() -> tuple[bytes, bytes]:
    return (HEADER.pack(Kind.PUSH, 0), bytes(_PUSHED_BYTES))
