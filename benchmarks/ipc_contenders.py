"""Queues with one writer and N readers, each behind the same few calls, and what is measured.

    python benchmarks/ipc_contenders.py vcli|vllm|pipe|zmq

A server: it reads one cell per line from stdin (JSON, see `Cell`), runs it in processes of its own,
and writes the result as a line of JSON. It imports its queue once, so cells of several servers can
alternate; it runs under the interpreter of its library and needs nothing of vcli but for `vcli`.
"""

import gc
import json
import os
import pickle
import random
import statistics
import sys
import tempfile
import time
import uuid
import warnings
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

FORK = get_context("fork")
WARM_UP = 30
STOP = "stop"
now_ns = time.monotonic_ns


@dataclass
class Cell:
    """`mode` is closed (reply from reader 0 each time), paced (`gap_s` between) or idle."""

    readers: int
    payload: str
    mode: str
    seconds: float = 0.5
    gap_s: float = 0.0


# ---- payloads --------------------------------------------------------------------------------


def make_payload(name: str) -> object:
    if name == "bytes100":
        return os.urandom(100)
    if name == "array8m":
        import numpy as np

        return np.random.default_rng(0).integers(0, 255, 8 << 20, dtype=np.uint8)
    rng = random.Random(0)
    numbers = range(256)
    blocks = [[rng.randrange(100_000)] if i % 16 == 0 else [] for i in numbers]
    computed = [rng.randrange(8192) for _ in numbers]
    if name == "step_packed":
        from vcli.runtime.messages import RunningRequests, SchedulerOutput

        running = RunningRequests(
            numbers=list(numbers),
            token_ids=[rng.randrange(150_000) for _ in numbers],
            num_computed_tokens=computed,
            new_block_ids=blocks,
        )
        return SchedulerOutput(
            step=7, new=[], running=running, num_scheduled_tokens=[1] * 256, removed=[1, 2]
        )
    # What vLLM's scheduler sends for a decode step: string ids, dictionaries, a set.
    ids = [f"cmpl-{rng.getrandbits(128):032x}-0" for _ in numbers]
    return {
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": {
            "req_ids": ids,
            "resumed_req_ids": set(),
            "new_token_ids": [[] for _ in ids],
            "new_block_ids": [(block,) if block else None for block in blocks],
            "num_computed_tokens": computed,
        },
        "num_scheduled_tokens": dict.fromkeys(ids, 1),
        "total_num_scheduled_tokens": 256,
        "num_common_prefix_blocks": [0],
        "finished_req_ids": set(ids[:2]),
        "free_encoder_mm_hashes": [],
    }


# ---- queues ----------------------------------------------------------------------------------


class Queue:
    """Made before the readers are forked; `links[i]` is a pipe between writer and reader i."""

    def __init__(self, num_readers: int) -> None:
        self.num_readers = num_readers

    def start_writer(self, links) -> None: ...
    def start_reader(self, index: int, link) -> None: ...


class Vcli(Queue):
    """As the mp executor has it: a 32 MiB ring to all, a 1 MiB ring for replies."""

    copies = True

    def __init__(self, num_readers: int) -> None:
        import msgspec

        from vcli.runtime.ipc import codec
        from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter

        super().__init__(num_readers)
        self.replace = msgspec.structs.replace
        self.codec, self.reader, self.writer = codec, BroadcastReader, BroadcastWriter
        self.calls = BroadcastWriter.create(num_readers, 32 << 20, "calls")
        self.replies, self.reply_handle = BroadcastReader.create(1 << 20, "replies")

    def start_reader(self, index: int, link) -> None:
        handle = self.calls.reader_handle(index)
        self.calls = self.reader.attach(self.replace(handle, creator_pid=0))
        if index == 0:
            self.replies = self.writer.attach(self.replace(self.reply_handle, creator_pid=0))

    def send(self, obj: object) -> None:
        self.calls.send(self.codec.encode(obj), 60.0)

    def recv(self) -> object:
        return self.codec.decode(self.calls.recv(60.0), copy=self.copies)

    def reply(self, obj: object) -> None:
        self.replies.send(self.codec.encode(obj), 60.0)

    def get_reply(self) -> object:
        return self.codec.decode(self.replies.recv(60.0))


class VcliView(Vcli):
    """The same, arrays as read-only views of the ring."""

    copies = False


class Vllm(Queue):
    """As vLLM's mp executor makes it: 16 MiB chunks to all, a queue of one reader for replies."""

    def __init__(self, num_readers: int) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        super().__init__(num_readers)
        self.queue = MessageQueue

    def start_writer(self, links) -> None:
        count = self.num_readers
        self.calls = self.queue(count, count, max_chunk_bytes=16 << 20)
        for link in links:
            link.send(self.calls.export_handle())
        self.replies = self.queue.create_from_handle(links[0].recv(), 0)
        self.calls.wait_until_ready()
        self.replies.wait_until_ready()

    def start_reader(self, index: int, link) -> None:
        self.calls = self.queue.create_from_handle(link.recv(), index)
        if index == 0:
            self.replies = self.queue(1, 1)
            link.send(self.replies.export_handle())
        self.calls.wait_until_ready()
        if index == 0:
            self.replies.wait_until_ready()

    def send(self, obj: object) -> None:
        self.calls.enqueue(obj)

    def recv(self) -> object:
        return self.calls.dequeue(indefinite=True)

    def reply(self, obj: object) -> None:
        self.replies.enqueue(obj)

    def get_reply(self) -> object:
        return self.replies.dequeue(indefinite=True)


class Pipe(Queue):
    """A pipe per reader; pickled once, written N times."""

    def __init__(self, num_readers: int) -> None:
        super().__init__(num_readers)
        self.pipes = [FORK.Pipe() for _ in range(num_readers)]

    def start_reader(self, index: int, link) -> None:
        self.mine = self.pipes[index][1]

    def send(self, obj: object) -> None:
        data = pickle.dumps(obj, 5)
        for writer, _ in self.pipes:
            writer.send_bytes(data)

    def recv(self) -> object:
        return pickle.loads(self.mine.recv_bytes())

    def reply(self, obj: object) -> None:
        self.mine.send_bytes(pickle.dumps(obj, 5))

    def get_reply(self) -> object:
        return pickle.loads(self.pipes[0][0].recv_bytes())


class Zmq(Queue):
    """PUB/SUB without a high-water mark, PUSH/PULL for replies, over ipc sockets."""

    def start_writer(self, links) -> None:
        import zmq

        context = zmq.Context()
        self.folder = tempfile.mkdtemp()
        base = f"ipc://{self.folder}/{uuid.uuid4().hex[:8]}"
        self.calls, self.replies = context.socket(zmq.XPUB), context.socket(zmq.PULL)
        self.calls.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.calls.setsockopt(zmq.SNDHWM, 0)
        self.calls.bind(base)
        self.replies.bind(base + "r")
        for link in links:
            link.send(base)
        for _ in links:
            self.calls.recv()

    def start_reader(self, index: int, link) -> None:
        import zmq

        base, context = link.recv(), zmq.Context()
        self.calls, self.replies = context.socket(zmq.SUB), context.socket(zmq.PUSH)
        self.calls.setsockopt(zmq.RCVHWM, 0)
        self.calls.setsockopt(zmq.SUBSCRIBE, b"")
        self.calls.connect(base)
        self.replies.connect(base + "r")

    def send(self, obj: object) -> None:
        self.calls.send(pickle.dumps(obj, 5), copy=False)

    def recv(self) -> object:
        return pickle.loads(self.calls.recv(copy=False).buffer)

    def reply(self, obj: object) -> None:
        self.replies.send(pickle.dumps(obj, 5))

    def get_reply(self) -> object:
        return pickle.loads(self.replies.recv())


QUEUES = {"vcli": Vcli, "vcli_view": VcliView, "vllm": Vllm, "pipe": Pipe, "zmq": Zmq}


# ---- measuring -------------------------------------------------------------------------------


def run_reader(queue: Queue, index: int, link) -> None:
    """Receive until told to stop, then hand over when each message was there."""
    queue.start_reader(index, link)
    link.send("up")
    stamps = []
    while True:
        obj = queue.recv()
        stamp = now_ns()
        if type(obj) is str:
            break
        if index == 0:
            queue.reply(stamp)
        stamps.append(stamp)
        # Memory of the message goes back before the wait for the next one.
        del obj
    link.send(stamps)
    link.recv()


def cpu_s(pid: int) -> float:
    """CPU seconds of a whole process, as its own clock in the kernel has them."""
    return time.clock_gettime(~pid << 3 | 2)


def run_writer(name: str, cell: Cell) -> dict[str, float]:
    queue = QUEUES[name](cell.readers)
    pairs = [FORK.Pipe() for _ in range(cell.readers)]
    links = [ours for ours, _ in pairs]
    pids = []
    for index, (_, theirs) in enumerate(pairs):
        pid = os.fork()
        if pid == 0:
            for ours in links:
                ours.close()
            try:
                run_reader(queue, index, theirs)
            finally:
                os._exit(0)
        pids.append(pid)
    queue.start_writer(links)
    for link in links:
        assert link.recv() == "up"
    payload = make_payload(cell.payload)
    gc.disable()
    for _ in range(WARM_UP):
        queue.send(payload)
        queue.get_reply()
    sent, trips, cpu, wall_s = measure(queue, cell, payload, pids)
    queue.send(STOP)
    stamps = [link.recv()[WARM_UP:] for link in links]
    latencies = [max(times) - start for start, *times in zip(sent, *stamps, strict=True)]
    for link in links:
        link.send("bye")
    for pid in pids:
        os.waitpid(pid, 0)
    result = {"messages": len(sent), "cpu_share": cpu / wall_s, "cpu_s": cpu}
    if trips:
        result |= {"round_trip_us": statistics.median(trips) / 1e3}
    if latencies:
        result |= {"latency_us": statistics.median(latencies) / 1e3}
        result |= {"cpu_us": cpu / len(sent) * 1e6}
    return result


def measure(queue, cell: Cell, payload, pids):
    """When each message was sent, round trips, CPU seconds of a reader, seconds in all."""
    sent, trips = [], []
    before_s, begin_ns = sum(map(cpu_s, pids)), now_ns()
    end_ns = begin_ns + int(cell.seconds * 1e9)
    if cell.mode == "idle":
        time.sleep(cell.seconds)
    while cell.mode != "idle" and now_ns() < end_ns:
        start = now_ns()
        queue.send(payload)
        queue.get_reply()
        trips.append(now_ns() - start)
        sent.append(start)
        if cell.gap_s:
            time.sleep(cell.gap_s)
    wall_s = (now_ns() - begin_ns) / 1e9
    return sent, trips, (sum(map(cpu_s, pids)) - before_s) / len(pids), wall_s


def serve(name: str) -> None:
    """Each cell in a fresh process; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    QUEUES[name](1)
    print(json.dumps({"ready": name}), file=out, flush=True)
    for line in sys.stdin:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            result = run_writer(name, Cell(**json.loads(line)))
            os.write(writer, json.dumps(result).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as results:
            text = results.read()
        os.waitpid(pid, 0)
        print(text or json.dumps({"error": f"{name} ended without a result"}), file=out, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    serve(sys.argv[1])
