"""A process at the other end of a queue, for the tests: `queue_child.py ROLE HANDLES [COUNT]`.

HANDLES is JSON, COUNT depends on the role. Every child ends by itself when its peer is gone.
"""

import hashlib
import os
import random
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from vcli.runtime.ipc import wakeup
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.codec import decode, encode
from vcli.runtime.ipc.errors import PeerDiedError, QueueTimeout
from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle


class Handles(msgspec.Struct):
    read: ReaderHandle | None = None
    write: WriterHandle | None = None


def tell(line: str) -> None:
    """One write per line: children may share a pipe."""
    os.write(1, line.encode() + b"\n")


def echo(reader: BroadcastReader, writer: BroadcastWriter, count: int) -> None:
    """Send every message back as it came."""
    while True:
        writer.send([bytes(part) for part in reader.recv(30.0)], 10.0)


def check_sequence(reader: BroadcastReader, writer: BroadcastWriter | None, count: int) -> None:
    """Read `count` records of (number, payload, digest) at a random pace; any gap is exit 3."""
    pace = random.Random(reader.reader_index)
    for expected in range(count):
        number, payload, digest = decode(reader.recv(30.0))
        if number != expected or hashlib.md5(payload).digest() != digest:
            sys.exit(3)
        if number == 0:
            tell("started")
        if pace.random() < 0.02:
            time.sleep(pace.random() * 0.004)


def check_arrays(reader: BroadcastReader, writer: BroadcastWriter | None, count: int) -> None:
    """Read `count` numbered arrays of `random_arrays`; any gap or wrong byte is exit 3."""
    num_bytes = 0
    for expected, (number, sent) in enumerate(random_arrays(count)):
        # Views and copies in turn.
        got_number, got = decode(reader.recv(30.0), copy=expected % 2 == 0)
        if got_number != number or not np.array_equal(got, sent):
            sys.exit(3)
        num_bytes += got.nbytes
    tell(str(num_bytes))


def random_arrays(count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Numbered arrays, 40 KB in the mean: in the pickle, out of band, above half of a 1 MiB ring.

    The same in every process.
    """
    rng = random.Random(11)
    base = np.frombuffer(rng.randbytes(1 << 20), np.uint8)
    for number in range(count):
        kind = rng.random()
        size = rng.randrange(8000)
        if kind > 0.97:
            size = rng.randrange(600_000, 800_000)
        elif kind > 0.6:
            size = rng.randrange(8 << 10, 100_000)
        start = rng.randrange((1 << 20) - size)
        yield number, base[start : start + size]


def hold(reader: BroadcastReader, writer: BroadcastWriter | None, count: int) -> None:
    """Take one record, say so, and never come back to the queue."""
    reader.recv(30.0)
    reader.set_activity("execute_model")
    tell("holding")
    sys.stdin.read()


def leave(reader: BroadcastReader, writer: BroadcastWriter | None, count: int) -> None:
    """Take one record, say so, and end with status 7, the queue open."""
    reader.recv(30.0)
    tell("holding")
    os._exit(7)


def sleep_in_recv(reader: BroadcastReader, writer: BroadcastWriter | None, count: int) -> None:
    """Wait in recv, with no look in between; print what it raised."""
    wakeup.RECHECK_S = 1000.0
    tell("waiting")
    try:
        while True:
            reader.recv(60.0)
    except (PeerDiedError, QueueTimeout) as error:
        tell(f"{type(error).__name__}: {error}")


def cpu_time(reader: BroadcastReader, writer: BroadcastWriter | None, count: int) -> None:
    """Read `count` records, then print the CPU seconds since the first."""
    reader.recv(30.0)
    before = time.process_time()
    for _ in range(count):
        reader.recv(30.0)
    tell(str(time.process_time() - before))


def send_then_wait(reader: BroadcastReader | None, writer: BroadcastWriter, count: int) -> None:
    """Send `count` numbered messages and stay alive, the queue open."""
    for number in range(count):
        writer.send(encode((number,)), 10.0)
    tell("sent")
    sys.stdin.read()


def send_and_leave(reader: BroadcastReader | None, writer: BroadcastWriter, count: int) -> None:
    """Send `count` messages and close in order."""
    for number in range(count):
        writer.send(encode((number,)), 10.0)
    writer.close()


def main() -> None:
    role, handles = globals()[sys.argv[1]], msgspec.json.decode(sys.argv[2], type=Handles)
    reader = None if handles.read is None else BroadcastReader.attach(handles.read)
    writer = None if handles.write is None else BroadcastWriter.attach(handles.write)
    role(reader, writer, int(sys.argv[3]))


if __name__ == "__main__":
    main()
