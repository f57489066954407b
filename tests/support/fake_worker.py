"""A worker without torch and model whose methods do what a test orders; and a config for it."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

from vcli.runtime.config import (
    CacheConfig,
    DeadlineConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from vcli.runtime.errors import FailedWithOutput
from vcli.runtime.messages import (
    GroupReport,
    KVCacheConfig,
    MemoryReport,
    ModelRunnerOutput,
    RunningRequests,
    SchedulerOutput,
)
from vcli.runtime.worker.extension import extended_class
from vcli.topology.config import ParallelConfig
from vcli.topology.model_spec import model_spec_from_config
from vcli.topology.planner import plan_topology

FAKE_WORKER = "tests.support.fake_worker:FakeWorker"

# What the number of the first request of a step makes the worker do.
STEP_RAISES_ON_RANK_1 = 901
STEP_KILLS_RANK_1 = 902
STEP_HANGS_ON_OUTPUT_RANK = 903
STEP_RAISES_LATE_ON_RANK_1 = 904
STEP_PEER_CLOSED_THEN_RANK_1_KILLED = 905

SPEC = model_spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 512,
        "max_position_embeddings": 128,
    },
    source="fake",
)


def fake_config(num_ranks: int = 1, **overrides: Any) -> EngineConfig:
    """An engine of `num_ranks` tensor parallel ranks on the CPU; `overrides` replace fields."""
    parallel = ParallelConfig(tensor_parallel_size=num_ranks)
    fields: dict[str, Any] = {
        "model": ModelConfig(
            path=Path("fake"), served_name="fake", spec=SPEC, dtype="float32", max_model_len=128
        ),
        "cache": CacheConfig(),
        "scheduler": SchedulerConfig(),
        "parallel": parallel,
        "plan": plan_topology(parallel, model=SPEC, dtype="float32"),
        "device_type": "cpu",
        "deadlines": DeadlineConfig(start_s=30.0, execute_model_s=20.0, shutdown_s=5.0),
        "log_level": "WARNING",
    }
    return EngineConfig(**{**fields, **overrides})


def fake_memory_report(rank: int) -> MemoryReport:
    """A rank of the fake model: the plan was right."""
    items = {"weight_bytes": 1000, "kv_bytes": 640, "kv_tokens": 64}
    return MemoryReport(rank=rank, device="cpu", device_uuid="", planned=items, measured=items)


def fake_step(step: int = 1, number: int = 1) -> SchedulerOutput:
    """A step of one running request."""
    return SchedulerOutput(
        step=step,
        new=[],
        running=RunningRequests(
            numbers=[number], token_ids=[5], num_computed_tokens=[3], new_block_ids=[[]]
        ),
        num_scheduled_tokens=[1],
    )


def sleep_in_c(seconds: int) -> None:
    """Sleep in libc, with the interpreter lock released: no signal handler of Python runs."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:  # a signal ends libc's sleep
        ctypes.CDLL(None).sleep(seconds)


def sleep_in_c_with_the_lock(seconds: int) -> None:
    """Sleep in libc and keep the interpreter lock: no other thread of Python runs."""
    library = ctypes.PyDLL(None)
    left = seconds
    while left:
        left = library.sleep(left)


class Payload:
    """An argument whose life can be watched."""


class FakeWorker:
    """Answers like a worker; every public method can be called by RPC."""

    joins_world: ClassVar[bool] = False

    def __new__(cls, config: EngineConfig, rank: int, **_: object) -> "FakeWorker":
        if config.worker_extension_cls is None:
            return super().__new__(cls)
        return object.__new__(extended_class(cls, config.worker_extension_cls))

    def __init__(self, config: EngineConfig, rank: int, *, rendezvous: object, report: Any) -> None:
        self.config = config
        self.rank = rank
        self._report = report
        self._is_output = config.plan.rank_plan(rank).is_output

    def init_device(self) -> None:
        for state in ("device", "joined", "groups"):
            self._report(state, None, "")

    def load_model(self) -> None:
        self._report("weights", 1.0, "")

    def determine_available_memory(self) -> int:
        return 1000 + self.rank

    def kv_bytes_per_block(self) -> int:
        return 10

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        self._report("kv", None, str(config.num_blocks))

    def compile_or_warm_up_model(self) -> None:
        self._report("warm-up", None, "")

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        numbers = output.running.numbers
        self._obey(numbers[0])
        if not self._is_output:
            return None
        return ModelRunnerOutput(
            step=output.step, numbers=numbers, token_ids=[number + 1 for number in numbers]
        )

    def sample_tokens(self, grammar: object | None = None) -> ModelRunnerOutput | None:
        return None

    def execute_dummy_batch(self) -> None:
        return None

    def check_health(self) -> None:
        return None

    def group_reports(self) -> list[GroupReport]:
        return [
            GroupReport(
                kind="TP",
                ranks=list(range(self.config.plan.world_size)),
                transport="fake",
                version="0",
                all_reduce="fake",
                verified=True,
                all_reduce_us=1.0,
                all_reduce_bytes=8,
            )
        ]

    def memory_report(self) -> MemoryReport:
        return fake_memory_report(self.rank)

    def shutdown(self) -> None:
        return None

    # ---- for tests --------------------------------------------------------------------------

    def echo(self, value: Any, *, times: int = 1) -> Any:
        return value * times

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def raise_on(self, ranks: list[int], message: str = "ordered") -> int:
        if self.rank in ranks:
            raise ValueError(f"{message} on rank {self.rank}")
        return self.rank

    def sleep_on(self, ranks: list[int], seconds: float) -> int:
        if self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    def wait_for_file_on(self, ranks: list[int], path: str) -> int:
        """Until somebody writes into the fifo."""
        if self.rank in ranks:
            Path(path).read_text()
        return self.rank

    def sleep_in_c_on(self, ranks: list[int], seconds: int) -> int:
        if self.rank in ranks:
            sleep_in_c(seconds)
        return self.rank

    def remember(self, payload: "Payload") -> None:
        self._remembered = weakref.ref(payload)

    def still_has_payload(self) -> bool:
        return self._remembered() is not None

    def fail_and_hand_on(self, ranks: list[int]) -> str:
        if self.rank in ranks:
            raise FailedWithOutput(f"failed on rank {self.rank}", {"saved": self.rank})
        return f"done on rank {self.rank}"

    def unpicklable(self) -> Any:
        return (number for number in range(3))

    def loaded(self, module: str) -> bool:
        return module in sys.modules

    def _private(self) -> int:
        return 1

    def _obey(self, order: int) -> None:
        if order == STEP_RAISES_ON_RANK_1 and self.rank == 1:
            raise ValueError("device-side assert on rank 1")
        if order == STEP_RAISES_ON_RANK_1 and self.rank == 0:
            time.sleep(60)  # as in a collective that rank 1 never enters
        if order == STEP_KILLS_RANK_1 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if order == STEP_KILLS_RANK_1 and self.rank == 0:
            sleep_in_c(60)
        if order == STEP_HANGS_ON_OUTPUT_RANK and self.rank == 0:
            time.sleep(60)
        if order == STEP_RAISES_LATE_ON_RANK_1 and self.rank == 1:
            time.sleep(0.2)
            raise ValueError("late on rank 1")
        if order == STEP_PEER_CLOSED_THEN_RANK_1_KILLED:
            if self.rank == 0:
                raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


class FailsToLoad(FakeWorker):
    """Rank 1 raises in load_model; rank 0 sees its peer leave, a moment earlier or later."""

    def load_model(self) -> None:
        self._report("weights", 0.5, "")
        if self.rank == 1:
            raise ValueError("tensor model.norm.weight is missing")
        raise ConnectionResetError("Connection reset by peer")


class FailsToLoadAlone(FakeWorker):
    """Rank 1 raises in load_model; rank 0 waits for it."""

    def load_model(self) -> None:
        self._report("weights", 0.5, "")
        if self.rank == 1:
            raise ValueError("tensor model.norm.weight is missing")
        time.sleep(60)


class DiesLoading(FakeWorker):
    """Rank 1 is killed while it loads, the others never get ready."""

    def load_model(self) -> None:
        self._report("weights", 0.25, "")
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


class NeverLoads(FakeWorker):
    """Rank 1 stays in its weights."""

    def load_model(self) -> None:
        self._report("weights", 0.4, "")
        if self.rank == 1:
            time.sleep(60)


class NeverLoadsAnywhere(FakeWorker):
    """All ranks stay in their weights, in C code."""

    def load_model(self) -> None:
        self._report("weights", 0.4, "")
        sleep_in_c(60)


class FakeExtension:
    """Methods that a user adds to the worker."""

    def doubled_rank(self) -> int:
        return 2 * int(vars(self)["rank"])


def rank_of(worker: FakeWorker, offset: int) -> int:
    """A function for RPC."""
    return worker.rank + offset


def exists(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class SamplingWorker(FakeWorker):
    """Gives each request that has computed all of its tokens token 7; keeps no text."""

    def determine_available_memory(self) -> int:
        return 1 << 30

    def __init__(self, config: EngineConfig, rank: int, **options: Any) -> None:
        super().__init__(config, rank, **options)
        self._num_tokens: dict[int, int] = {}

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        for number in output.removed:
            self._num_tokens.pop(number, None)
        numbers, computed = [], []
        for data in output.new:
            self._num_tokens[data.number] = len(data.token_ids)
            numbers.append(data.number)
            computed.append(data.num_computed_tokens)
        running = output.running
        for number, token_id in zip(running.numbers, running.token_ids, strict=True):
            self._num_tokens[number] += token_id != -1
        numbers += running.numbers
        computed += running.num_computed_tokens
        if not self._is_output:
            return None
        ends = [
            start + count
            for start, count in zip(computed, output.num_scheduled_tokens, strict=True)
        ]
        token_ids = [
            7 if end == self._num_tokens[number] else -1
            for number, end in zip(numbers, ends, strict=True)
        ]
        return ModelRunnerOutput(step=output.step, numbers=numbers, token_ids=token_ids)


class SlowResult:
    """A result that a device computes for a while; knows which thread waited for it."""

    def __init__(self, value: Any, seconds: float, thread_names: list[str]) -> None:
        self._value = value
        self._seconds = seconds
        self._thread_names = thread_names

    def resolve(self) -> Any:
        time.sleep(self._seconds)
        self._thread_names.append(threading.current_thread().name)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class DeviceFakeWorker(FakeWorker):
    """Gives results that are still on their way."""

    def __init__(self, config: EngineConfig, rank: int, **options: Any) -> None:
        super().__init__(config, rank, **options)
        self._resolved_in: list[str] = []
        self._bound_in: list[str] = []

    def bind_thread(self) -> None:
        self._bound_in.append(threading.current_thread().name)

    def later(self, value: Any, seconds: float = 0.0) -> SlowResult:
        return SlowResult(value, seconds, self._resolved_in)

    def fail_later(self, message: str) -> SlowResult:
        return SlowResult(ValueError(message), 0.0, self._resolved_in)

    def threads(self) -> tuple[list[str], list[str]]:
        return self._bound_in, self._resolved_in
