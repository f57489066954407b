"""The lines about memory: planned, measured, and what is told of a difference."""

from vcli.cli.views.memory import measured_lines, planned_lines
from vcli.runtime.messages import MemoryReport
from vcli.topology.rank_memory import MemoryItems, RankMemoryPlan

GIB = 1 << 30
ITEMS = MemoryItems(
    weight_bytes=15 * GIB,
    activation_bytes=GIB,
    graph_bytes=GIB,
    context_bytes=GIB,
    kv_bytes=90 * GIB,
    kv_tokens=737_280,
)
NUMBERS = {
    "weight_bytes": 15 * GIB, "activation_bytes": GIB, "graph_bytes": GIB,
    "context_bytes": GIB, "kv_bytes": 90 * GIB, "kv_tokens": 737_280,
}  # fmt: skip


def report(rank, device="cuda:0", **changes):
    return MemoryReport(
        rank=rank, device=device, device_uuid="GPU-1", planned=NUMBERS, measured=NUMBERS | changes
    )


def test_ranks_that_are_alike_share_the_planned_line():
    plans = [RankMemoryPlan(rank=rank, items=ITEMS) for rank in range(4)]
    assert planned_lines(plans, width=300) == [
        "memory ranks 0-3 (planned): NCCL and context 1.0 GiB · weights 15.0 GiB · "
        "activation peak 1.0 GiB · KV cache 90.0 GiB = 737,280 tokens · CUDA graphs 1.0 GiB"
    ]
    assert all(len(line) <= 60 for line in planned_lines(plans, width=60))


def test_what_is_not_known_is_left_out():
    plans = [RankMemoryPlan(rank=0, items=MemoryItems(weight_bytes=GIB))]
    assert planned_lines(plans, width=80) == ["memory rank 0 (planned): weights 1.0 GiB"]
    assert planned_lines([], width=80) == []


def test_measured_values_stand_beside_the_planned_ones():
    [line] = measured_lines([report(0), report(1)])
    assert line.startswith("memory ranks 0-1: NCCL and context 1.0 GiB (planned 1.0 GiB) · ")
    assert "KV cache 90.0 GiB = 737,280 tokens (planned 90.0 GiB)" in line


def test_a_warning_names_the_ranks_and_the_item():
    lines = list(measured_lines([report(0), report(1, graph_bytes=3 * GIB)]))
    [warning] = [line for line in lines if line.startswith("!")]
    assert warning.startswith("! memory rank 1: CUDA graphs 3.00 GiB, 2.00 GiB more than")


def test_a_cpu_gets_no_warning():
    lines = list(measured_lines([report(0, device="cpu", kv_bytes=GIB)]))
    assert len(lines) == 1
    assert not lines[0].startswith("!")
