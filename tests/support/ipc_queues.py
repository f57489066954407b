"""A whole queue in one process, and threads at its ends."""

import threading
import time
from pathlib import Path

from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter

CAPACITY = 1 << 16


class Queue:
    def __init__(self, num_readers=1, capacity=CAPACITY, num_processes=99):
        self.writer = BroadcastWriter.create(
            num_readers, capacity, "steps", num_processes=num_processes
        )
        self.readers = [
            BroadcastReader.attach(self.writer.reader_handle(i)) for i in range(num_readers)
        ]

    def __enter__(self):
        return self.writer, *self.readers

    def __exit__(self, *_):
        self.writer.close()
        for reader in self.readers:
            reader.close()


def in_thread(function, *args):
    """Run in a thread; gives a callable that joins and returns the result or raises the error."""
    outcome = []

    def run():
        try:
            outcome.append((function(*args), None))
        except Exception as error:  # noqa: BLE001  raised again by the joiner
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def join(timeout_s=10.0):
        thread.join(timeout_s)
        assert not thread.is_alive(), "the thread still waits"
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    join.thread = thread
    return join


def sleeping(thread):
    """Wait until a thread sleeps in the kernel."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if stat.read_text().rpartition(")")[2].split()[0] == "S":
            return
    raise AssertionError("the thread does not sleep")
