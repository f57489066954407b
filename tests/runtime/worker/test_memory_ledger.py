"""What a rank notes of its memory, on a CPU and on a GPU that is made of numbers."""

from dataclasses import replace

import pytest
import torch

from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import engine_config, kv_config
from vcli.runtime.config import CacheConfig
from vcli.runtime.messages import KVCacheConfig
from vcli.runtime.worker import device, memory_ledger
from vcli.runtime.worker.device import take_device
from vcli.runtime.worker.memory import GpuMemory
from vcli.runtime.worker.memory_ledger import MemoryLedger
from vcli.runtime.worker.worker import Worker
from vcli.topology.rank_memory import MemoryItems, RankMemoryPlan

GIB = 1 << 30
PLANNED = RankMemoryPlan(rank=0, items=MemoryItems(weight_bytes=5 * GIB), free_bytes=79 * GIB)


class Gpu:
    """80 GiB of which others hold 1; `taken` is what torch has, `outside` what is beside it."""

    def __init__(self, monkeypatch):
        self.taken, self.outside, self.peak = 0, GIB, 0
        monkeypatch.setattr(memory_ledger, "measure_gpu", lambda _: self.measure())
        monkeypatch.setattr(memory_ledger, "warm_up_blas", lambda *_: None)
        monkeypatch.setattr(memory_ledger, "device_uuid", lambda _: "GPU-1")
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.taken)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.measure().free_bytes, 0))

    def measure(self):
        return GpuMemory(
            total_bytes=80 * GIB,
            free_bytes=80 * GIB - self.outside - self.taken,
            torch_allocated_bytes=self.taken,
            torch_reserved_bytes=self.taken,
            torch_peak_bytes=max(self.peak, self.taken),
        )


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def ledger(**cache):
    config = engine_config(tiny_checkpoint(), cache=CacheConfig(**cache))
    config = replace(config, memory_plan=(PLANNED,))
    return MemoryLedger(config, config.plan.rank_plan(0))


def grow(gpu, **changes):
    for name, num_bytes in changes.items():
        setattr(gpu, name, getattr(gpu, name) + num_bytes)


def test_each_phase_of_a_gpu_is_an_item_of_its_own(gpu):
    noted = ledger(gpu_memory_utilization=0.5)
    grow(gpu, outside=2 * GIB)  # context and NCCL
    noted.begin(torch.device("cuda", 0), torch.bfloat16)
    grow(gpu, taken=6 * GIB)
    num_bytes, how = noted.kv_cache_bytes(lambda: setattr(gpu, "peak", 9 * GIB))
    assert num_bytes == (40 - 9) * GIB
    assert how == "gpu_memory_utilization=0.5"
    grow(gpu, taken=4 * GIB)
    noted.note_kv_cache(KVCacheConfig(num_blocks=4, block_size=16), GIB)

    def capture():
        grow(gpu, outside=GIB // 2, taken=GIB // 4)
        return 35

    assert noted.capture(capture) == 35
    report = noted.report()
    assert report.measured == {
        "context_bytes": 2 * GIB,
        "weight_bytes": 6 * GIB,
        "activation_bytes": 3 * GIB,
        "kv_bytes": 4 * GIB,
        "kv_tokens": 64,
        "graph_bytes": 3 * GIB // 4,
    }
    assert report.planned == {"weight_bytes": 5 * GIB}
    assert (report.device, report.device_uuid) == ("cuda:0", "GPU-1")
    assert report.free_bytes == gpu.measure().free_bytes


def test_a_given_cache_is_not_measured_for(gpu):
    noted = ledger(kv_cache_memory_bytes=GIB)
    noted.begin(torch.device("cuda", 0), torch.bfloat16)

    def never():
        raise AssertionError("a step was run")

    assert noted.kv_cache_bytes(never) == (GIB, "as configured")


def test_a_cpu_rank_reports_weights_and_cache():
    config = engine_config(tiny_checkpoint())
    worker = Worker(config, 0, rendezvous=None, report=lambda *_: None)
    worker.init_device()
    worker.load_model()
    weights = sum(p.nbytes for p in worker._need_runner().model.parameters())
    worker.determine_available_memory()
    worker.initialize_from_config(kv_config(8))
    worker.compile_or_warm_up_model()
    report = worker.memory_report()
    worker.shutdown()
    assert report.measured == {
        "weight_bytes": weights,
        "kv_bytes": 8 * worker_block_bytes(config),
        "kv_tokens": 8 * config.cache.block_size,
    }
    assert (report.planned, report.free_bytes) == ({}, None)


def worker_block_bytes(config):
    return config.plan.memory.ranks[0].kv_bytes_per_token * config.cache.block_size


def test_another_gpu_than_the_planned_one_is_told(monkeypatch, caplog):
    config = engine_config(tiny_checkpoint(), device_type="cuda")
    plan = replace(config.plan.rank_plan(0), device_uuid="GPU-planned")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(device, "device_uuid", lambda _: "GPU-found")
    told = []
    monkeypatch.setattr(device.logger, "warning", lambda text, *values: told.append(text % values))
    take_device(config, plan, torch.float32)
    assert len(told) == 1
    assert "cuda:0 is GPU-found, the plan is made for GPU-planned" in told[0]
