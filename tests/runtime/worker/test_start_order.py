"""What a GPU rank does before its memory is measured, on a GPU that is made of numbers."""

import pytest
import torch

from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import engine_config
from vcli.runtime.distributed.parallel_state import single_rank_context
from vcli.runtime.distributed.rendezvous import RendezvousTarget
from vcli.runtime.worker import memory_ledger
from vcli.runtime.worker import worker as worker_module
from vcli.runtime.worker.memory import GpuMemory
from vcli.runtime.worker.worker import Worker
from vcli.topology.config import ParallelConfig

GIB = 1 << 30
GPU = torch.device("cuda", 0)
ORDER = (
    "take_device",
    "join_world",
    "build_parallel_context",
    "prepare_groups",
    "state groups",
    "warm_up_blas",
    "measure_gpu",
    "build_model",
    "load_weights",
)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called, in order: the parts of a start that need a GPU or peers only note it."""
    noted: list[str] = []

    def note(module, name, result=None):
        def noting(*_: object, **__: object):
            noted.append(name)
            return result() if callable(result) else result

        monkeypatch.setattr(module, name, noting)

    note(worker_module, "start_prefetch")
    note(worker_module, "take_device", GPU)
    note(worker_module, "join_world")
    note(worker_module, "build_parallel_context", single_rank_context)
    note(worker_module, "prepare_groups", lambda: (single_rank_context(), []))
    note(worker_module, "seed_generators")
    note(memory_ledger, "warm_up_blas")
    note(
        memory_ledger,
        "measure_gpu",
        GpuMemory(
            total_bytes=80 * GIB,
            free_bytes=79 * GIB,
            torch_allocated_bytes=0,
            torch_reserved_bytes=0,
            torch_peak_bytes=0,
        ),
    )
    note(worker_module, "build_model", lambda: torch.nn.Linear(1, 1))
    note(worker_module, "load_weights")
    note(worker_module, "make_runner")
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return noted


def test_memory_is_measured_after_the_groups_and_blas_and_before_the_weights(
    events: list[str],
) -> None:
    config = engine_config(
        tiny_checkpoint(), parallel=ParallelConfig(tensor_parallel_size=2), dtype="bfloat16"
    )
    worker = Worker(
        config,
        0,
        rendezvous=RendezvousTarget(path="/nowhere"),
        report=lambda state, *_: events.append(f"state {state}"),
    )
    worker.init_device()
    worker.load_model()
    assert [event for event in events if event in ORDER] == list(ORDER)


def test_rank_on_a_cpu_warms_up_no_blas(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "take_device", lambda *_: torch.device("cpu"))
    worker = Worker(engine_config(tiny_checkpoint()), 0, rendezvous=None, report=lambda *_: None)
    worker.init_device()
    assert "prepare_groups" in events
    assert not {"warm_up_blas", "measure_gpu"} & set(events)
