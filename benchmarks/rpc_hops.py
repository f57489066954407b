"""The way of one call, and of one step: microseconds, and who has to be woken for it.

    python benchmarks/rpc_hops.py [--calls 500] [--steps 1000] [--only uni1 mp2 ...] [--json]

Front end -> engine core -> all ranks -> back, with workers that answer at once and without torch,
over the processes, rings and sockets of `vcli serve`. `call` is an empty method of all ranks, one
after the other; `step` is a token of one running request. Voluntary context switches are those of
`/proc`, per call, by process and thread: each is a thread that had to be woken.
"""

import argparse
import dataclasses
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.fake_worker import SamplingWorker, fake_config
from vcli.runtime.config import EngineConfig, ModelConfig
from vcli.runtime.core.core_proc import EngineCoreProc
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.ipc.frames import FrameSocket, frame_pair
from vcli.runtime.messages import (
    CoreMessage,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    ShutdownCore,
    UtilityCall,
    UtilityReply,
)
from vcli.runtime.process.child import ChildContext, ChildSpec
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.watchdog import Watchdog

CASES = {"uni1": ("uni", 1), "mp1": ("mp", 1), "mp2": ("mp", 2), "mp4": ("mp", 4)}
WARM_UP = 30
WAIT_S = 60.0


def name_threads() -> None:
    """Give threads that start from now on their Python names in the kernel too."""
    run = threading.Thread.run

    def named_run(self: threading.Thread) -> None:
        task = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        task.write_text(self.name[:15])
        run(self)

    threading.Thread.run = named_run


class HopWorker(SamplingWorker):
    """Answers at once, in a process with named threads."""

    joins_world: ClassVar[bool] = False

    def load_model(self) -> None:
        name_threads()


def serve_core(context: ChildContext, config: EngineConfig, backend: str, client_fd: int) -> None:
    """The engine core as `core_main` makes it, over `HopWorker`s."""
    name_threads()
    base = get_executor_class(backend)

    class HopExecutor(base):
        def __init__(self, config: EngineConfig, **options: Any) -> None:
            super().__init__(config, worker_cls="rpc_hops:HopWorker", **options)

    watchdog = Watchdog(config.deadlines.stall_s, page=context.page)
    client = socket.socket(fileno=client_fd)
    EngineCoreProc(context, config, client, HopExecutor, watchdog=watchdog).run()


class FrontEnd:
    """A core behind its socket, used from this thread."""

    def __init__(self, backend: str, num_ranks: int) -> None:
        config = fake_config(num_ranks)
        spec = dataclasses.replace(config.model.spec, max_position_embeddings=1 << 16)
        model = ModelConfig(
            path=Path("fake"), served_name="fake", spec=spec, dtype="float32", max_model_len=1 << 16
        )
        config = dataclasses.replace(config, model=model)
        ours, theirs = frame_pair()
        self._frames = FrameSocket(ours)
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._children = ChildGroup(on_message=lambda _: None, on_failure=lambda _: None)
        self._children.start(
            [
                ChildSpec(
                    target="rpc_hops:serve_core",
                    arguments=(config, backend, theirs.fileno()),
                    title="EngineCore",
                    environ={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=(theirs.fileno(),),
                    log_level="WARNING",
                )
            ]
        )
        theirs.close()
        self.started = self._children.wait_ready(WAIT_S)[0]
        workers = self.started["worker_pids"]
        self.pids = {"front": os.getpid(), "core": self._children.pids[0], **workers}

    def close(self) -> None:
        self._send(ShutdownCore(drain=False))
        self._children.shutdown(5.0)
        self._frames.close()

    def call(self) -> None:
        """An empty call of all ranks."""
        arguments = ["check_health"]
        self._send(UtilityCall(call_id=1, method="collective_rpc", arguments=arguments))
        reply = self._until(UtilityReply)
        assert not reply.error, reply.error

    def steps(self, count: int) -> list[float]:
        """Seconds of each token of one request after its first."""
        sampling = SamplingParams(temperature=0.0, max_tokens=count + 1, ignore_eos=True)
        self._send(EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], sampling=sampling))
        times: list[float] = []
        while True:
            for output in self._until(EngineOutputs).outputs:
                times += [time.perf_counter()] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    assert len(times) == count + 1, output.error
                    return [end - begin for begin, end in pairwise(times)]

    def _send(self, message: Any) -> None:
        self._frames.send(self._encoder.encode(message), WAIT_S)

    def _until(self, kind: type) -> Any:
        while True:
            message = self._decoder.decode(self._frames.recv(WAIT_S) or b"")
            assert not isinstance(message, EngineFailed), message
            if isinstance(message, kind):
                return message


def switches(pids: dict[str, int]) -> Counter[str]:
    """Voluntary context switches so far, by `process/thread`."""
    found: Counter[str] = Counter()
    for process, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            thread = "main" if task.name == str(pid) else (task / "comm").read_text().strip()
            status = (task / "status").read_text()
            found[f"{process}/{thread}"] += int(
                status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]
            )
    return found


def cpu_s(pids: dict[str, int]) -> float:
    """CPU seconds of all processes so far."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids.values())


def measure(front: FrontEnd, kind: str, count: int) -> dict[str, Any]:
    """One row: `count` calls, or steps."""
    before, cpu_before = switches(front.pids), cpu_s(front.pids)
    began_s = time.perf_counter()
    if kind == "step":
        seconds = front.steps(count)
    else:
        seconds = []
        for _ in range(count):
            call_began_s = time.perf_counter()
            front.call()
            seconds.append(time.perf_counter() - call_began_s)
    wall_s = time.perf_counter() - began_s
    cpu = (cpu_s(front.pids) - cpu_before) / count
    per_call = {
        name: round(number / count, 2)
        for name, number in sorted((switches(front.pids) - before).items())
        if number / count >= 0.02
    }
    return {
        "kind": kind,
        "per_s": round(count / wall_s),
        "us": round(statistics.median(seconds) * 1e6, 1),
        "cpu_us": round(cpu * 1e6, 1),
        "switches": round(sum(per_call.values()), 2),
        "by_thread": per_call,
    }


def main() -> None:
    """Measure each case and print a row for its calls and one for its steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", action="store_true", help="a JSON line for each row")
    options = parser.parse_args()
    for case in options.only:
        backend, num_ranks = CASES[case]
        front = FrontEnd(backend, num_ranks)
        try:
            for _ in range(WARM_UP):
                front.call()
            for kind, count in (("call", options.calls), ("step", options.steps)):
                row = {"backend": backend, "tp": num_ranks, **measure(front, kind, count)}
                if options.json:
                    print(json.dumps(row), flush=True)
                    continue
                print(
                    f"{backend:>3} TP {num_ranks} {kind}: {row['per_s']} /s, "
                    f"{row['us']} us median, {row['cpu_us']} us CPU, {row['switches']} switches"
                )
                for name, number in row["by_thread"].items():
                    print(f"      {number:6.2f}  {name}", flush=True)
        finally:
            front.close()


if __name__ == "__main__":
    main()
