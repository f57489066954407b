"""Arithmetic of the KV cache's size, from made-up states of a machine and of a GPU."""

from dataclasses import replace

import pytest

from vcli.runtime.ipc.segment import MemoryBudget
from vcli.runtime.worker import memory
from vcli.runtime.worker.memory import (
    GPU_RESERVE_BYTES,
    GpuMemory,
    cpu_kv_cache_bytes,
    free_host_bytes,
    gpu_kv_cache_bytes,
)
from vcli.topology.errors import UnfitError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "ranks", "expected"),
    [(16 * GIB, 1, 4 * GIB), (16 * GIB, 4, GIB), (10, 3, 0), (0, 2, 0)],
)
def test_cpu_ranks_share_a_quarter_of_what_is_free(free, ranks, expected):
    assert cpu_kv_cache_bytes(free, ranks) == expected


def test_tightest_budget_is_what_is_free(monkeypatch):
    budgets = [
        MemoryBudget(source=source, limit_bytes=100, available_bytes=available)
        for source, available in (("machine", 90), ("cgroup", 40), ("parent", 60))
    ]
    monkeypatch.setattr(memory, "memory_budgets", lambda: budgets)
    assert free_host_bytes() == 40


def test_overdrawn_cgroup_leaves_nothing_instead_of_less(monkeypatch):
    budget = MemoryBudget(source="cgroup", limit_bytes=100, available_bytes=-5)
    monkeypatch.setattr(memory, "memory_budgets", lambda: [budget])
    assert free_host_bytes() == 0


def test_machine_that_does_not_say_is_unfit(monkeypatch):
    monkeypatch.setattr(memory, "memory_budgets", lambda: [])
    with pytest.raises(UnfitError, match="how much memory is free"):
        free_host_bytes()


def test_this_machine_says_what_is_free():
    assert free_host_bytes() > 0


AT_START = GpuMemory(
    total_bytes=80 * GIB,
    free_bytes=79 * GIB,
    torch_allocated_bytes=0,
    torch_reserved_bytes=0,
    torch_peak_bytes=0,
)
# 10 GiB of weights, a step that took 4 more, and 1 GiB that grew outside torch.
AFTER = GpuMemory(
    total_bytes=80 * GIB,
    free_bytes=68 * GIB,
    torch_allocated_bytes=10 * GIB,
    torch_reserved_bytes=10 * GIB,
    torch_peak_bytes=14 * GIB,
)


def kv_bytes(*, at_start=AT_START, after=AFTER, utilization=0.5, graph_bytes=0):
    return gpu_kv_cache_bytes(
        at_start=at_start,
        after_profile=after,
        gpu_memory_utilization=utilization,
        graph_bytes=graph_bytes,
    )


def test_budget_pays_for_weights_peak_and_growth():
    assert kv_bytes() == (40 - 14 - 1) * GIB


def test_graphs_are_paid_by_budget_and_by_what_is_free():
    for utilization in (0.5, 1.0):
        without = kv_bytes(utilization=utilization)
        assert kv_bytes(utilization=utilization, graph_bytes=2 * GIB) == without - 2 * GIB


def test_memory_of_another_process_is_not_charged_to_the_budget():
    others = 30 * GIB
    at_start = replace(AT_START, free_bytes=AT_START.free_bytes - others)
    after = replace(AFTER, free_bytes=AFTER.free_bytes - others)
    assert kv_bytes(at_start=at_start, after=after) == kv_bytes()


def test_what_is_free_bounds_the_cache_whatever_the_budget():
    # 100 % allowed, but besides the cache the next step's 4 GiB and the reserve must fit.
    assert kv_bytes(utilization=1.0) == (68 - 4) * GIB - GPU_RESERVE_BYTES


def test_cached_but_unused_memory_of_torch_serves_the_next_peak():
    after = replace(AFTER, torch_reserved_bytes=14 * GIB, free_bytes=64 * GIB)
    assert kv_bytes(after=after, utilization=1.0) == 64 * GIB - GPU_RESERVE_BYTES


def test_surplus_of_torchs_cache_is_not_counted_as_free():
    after = replace(AFTER, torch_reserved_bytes=16 * GIB, free_bytes=62 * GIB)
    assert kv_bytes(after=after, utilization=1.0) == 62 * GIB - GPU_RESERVE_BYTES


def test_memory_that_others_gave_back_meanwhile_is_no_negative_growth():
    at_start = replace(AT_START, free_bytes=70 * GIB)
    assert kv_bytes(at_start=at_start) == (40 - 14) * GIB


def test_nothing_left_is_unfit_with_the_figures_and_a_way_out():
    with pytest.raises(UnfitError) as caught:
        kv_bytes(utilization=0.15)
    assert "12.00 GiB allowed" in caught.value.message
    assert "14.00 GiB" in caught.value.message
    assert "--gpu-memory-utilization" in caught.value.hint
