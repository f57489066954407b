"""Sums over shared memory: what goes which way, and that all ranks of a group choose the same.

The fused kernel runs in Triton's interpreter, in real processes that share memory; where Triton is
not installed, that is left out.
"""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.selection import describe, prefix_limit, sum_limits
from vcli.runtime.distributed.symmetric import (
    INPUT_BYTES,
    MAX_ROW,
    PROGRAMS,
    REGION_BYTES,
    AllReduceLimits,
    SymmetricCommunicator,
    fits_regions,
    total_bytes,
)

SCRIPT = Path(__file__).with_name("summing_rank.py")
ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 120
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_world(scenario, world, **options):
    """What each rank gives."""
    with ExitStack() as stack:
        for name in ("store", "memory"):
            descriptor = os.memfd_create(f"vcli-test-{name}")
            stack.callback(os.close, descriptor)
            options[name] = f"/proc/{os.getpid()}/fd/{descriptor}"
        environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": python_path()}
        children = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), scenario, str(rank), str(world), json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
            )
            for rank in range(world)
        ]
        try:
            outputs = [child.communicate(timeout=DEADLINE_S) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors
    return [json.loads(output) for output, _ in outputs]


def python_path():
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class FakeMemory:
    """One rank's memory on the CPU, at a place of its own."""

    def __init__(self):
        self.own = torch.zeros(total_bytes(2), dtype=torch.uint8)

    def addresses(self):
        return [self.own.data_ptr(), 0]

    def close(self):
        pass


@pytest.fixture
def communicator(monkeypatch):
    """A communicator on the CPU whose ways only say that they were gone."""
    channel = SimpleNamespace(group_name="0")
    group = GroupHandle(
        kind="TP", ranks=(0, 1), rank_in_group=0, device_group=channel, cpu_group=channel
    )
    given = SymmetricCommunicator(group, FakeMemory(), torch.device("cpu"))
    given.limits = AllReduceLimits(one_shot=1024, two_shot=4096, fused_norm=512)
    given.gone = []
    for way in ("one_shot", "two_shot", "fused_norm"):
        monkeypatch.setattr(given, way, lambda *_, way=way: given.gone.append(way))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: given.gone.append("nccl"))
    return given


@pytest.mark.parametrize(
    ("num_elements", "dtype", "way"),
    [
        (256, torch.float32, "one_shot"),
        (260, torch.float32, "two_shot"),
        (2048, torch.bfloat16, "two_shot"),
        (2056, torch.bfloat16, "nccl"),
        (255, torch.float32, "nccl"),
        (256, torch.float16, "nccl"),
        (64, torch.int32, "nccl"),
    ],
)
def test_the_size_and_the_type_decide_how_a_tensor_is_summed(
    communicator, num_elements, dtype, way
):
    communicator.all_reduce(torch.zeros(num_elements, dtype=dtype))
    assert communicator.gone == [way]


def test_tensors_with_gaps_and_of_other_devices_go_by_the_process_group(communicator):
    communicator.all_reduce(torch.zeros(8, 32)[:, ::2])
    communicator.all_reduce(torch.zeros(8, device="meta"))
    assert communicator.gone == ["nccl", "nccl"]


def test_a_product_may_write_where_the_peers_read_unless_it_is_not_read_there(communicator):
    buffer = communicator.input_buffer((4, 64), torch.float32)
    assert buffer.shape == (4, 64)
    torch.mm(torch.ones(4, 3), torch.ones(3, 64), out=buffer)
    assert torch.equal(communicator._staged(buffer), torch.full((4, 64), 3.0))
    assert communicator._staged(buffer).data_ptr() == buffer.data_ptr()
    fused, by_nccl, odd = ((2, 64), (64, 64), (15, 17))
    for shape in (fused, by_nccl, odd):
        assert communicator.input_buffer(shape, torch.float32) is None
    assert communicator.input_buffer((8, 64), torch.float16) is None


def test_what_is_not_in_the_buffer_is_copied_there(communicator):
    tensor = torch.arange(64.0)
    staged = communicator._staged(tensor)
    assert torch.equal(staged, tensor)
    assert staged.data_ptr() == communicator.input_buffer((8, 64), torch.float32).data_ptr()


def test_the_norm_is_fused_up_to_its_limit_and_for_like_tensors(communicator):
    def fuses(num_rows, *, dtype=torch.float32, weight_dtype=torch.float32, step=1):
        x = torch.zeros(num_rows, 32 * step, dtype=dtype)[:, ::step]
        weight = torch.ones(32, dtype=weight_dtype)
        return communicator.add_rms_norm(x, torch.zeros_like(x), weight, 1e-6) is not None

    assert fuses(4)
    assert not fuses(5)
    assert fuses(8, dtype=torch.float16, weight_dtype=torch.float16)
    assert not fuses(2, weight_dtype=torch.bfloat16)
    assert not fuses(2, step=2)
    assert communicator.gone == ["fused_norm"] * 2


def test_a_closed_communicator_sums_by_the_process_group(communicator):
    communicator.close()
    communicator.all_reduce(torch.zeros(256))
    assert communicator.gone == ["nccl"]
    assert communicator.input_buffer((4, 64), torch.float32) is None


def test_every_program_has_room_for_its_rows():
    for num_rows in (1, PROGRAMS - 1, PROGRAMS, PROGRAMS + 1, 256, 4 * PROGRAMS):
        rows_here = max(
            len(range(program, num_rows, PROGRAMS)) for program in range(min(num_rows, PROGRAMS))
        )
        largest = REGION_BYTES // 2 // rows_here
        if largest <= MAX_ROW:
            assert fits_regions(num_rows, largest, 2)
            assert not fits_regions(num_rows, largest + 1, 2)
    assert fits_regions(256, 8192, 2)
    assert not fits_regions(1, MAX_ROW + 1, 2)
    assert not fits_regions(0, 64, 2)


def test_a_way_is_taken_from_the_smallest_size_to_where_another_is_faster():
    assert prefix_limit({8: 1.0, 64: 1.0, 256: 3.0}, {8: 2.0, 64: 2.0, 256: 2.0}) == 64
    assert prefix_limit({8: 3.0, 64: 1.0}, {8: 2.0, 64: 2.0}) == 0
    assert prefix_limit({8: 1.0}, {}) == 8, "the other failed at once"
    assert prefix_limit({}, {8: 1.0}) == 0


def test_limits_follow_the_times():
    times = {
        "one-shot": {8: 1.0, 64: 2.0, 1024: 9.0},
        "two-shot": {8: 2.0, 64: 3.0, 1024: 4.0, 4096: 9.0},
        "NCCL": {8: 3.0, 64: 3.0, 1024: 5.0, 4096: 8.0},
    }
    assert sum_limits(times) == AllReduceLimits(one_shot=64, two_shot=1024)
    assert sum_limits(times | {"one-shot": {}}) == AllReduceLimits(one_shot=0, two_shot=1024)
    assert sum_limits(times | {"one-shot": {}, "two-shot": {}}) == AllReduceLimits()


def test_the_report_says_what_goes_which_way():
    limits = AllReduceLimits(one_shot=256 << 10, two_shot=INPUT_BYTES, fused_norm=2 << 20)
    assert describe(limits) == (
        "symmetric one-shot <= 256 KiB, two-shot <= 16 MiB, NCCL above; "
        "with the norm in one kernel <= 2 MiB"
    )
    assert describe(AllReduceLimits()) == "nccl"


@pytest.mark.process
def test_a_way_that_fails_on_one_rank_is_dropped_on_all():
    results = run_world("choice", 2)
    assert results[0] == results[1]
    times, reasons = results[0]["times"], results[0]["reasons"]
    assert set(times["right"]) == {"64", "256"}
    assert times["wrong_on_one_rank"] == times["raises_on_one_rank"] == times["not_made"] == {}
    wrong, raised, not_made = reasons
    assert "rank 1" in wrong
    assert "1 of 16 sums are wrong: element 5" in wrong
    assert raised.startswith("raises_on_one_rank at ")
    assert not_made.endswith("rank 1: RuntimeError: no such kernel")
    assert results[0]["late"] == "rank 0: TimeoutError: no time left to try it"


@pytest.mark.process
def test_a_device_that_hangs_ends_all_ranks_with_its_name():
    results = run_world("stuck", 2)
    assert results[0] == results[1]
    assert "rank 1: cuda:1 was still busy" in results[0]["error"]
    assert results[0]["exit"] == 1


@pytest.mark.process
def test_data_over_every_pair_is_checked_in_both_directions():
    results = run_world("pairs", 3)
    for result in results:
        assert result["first"] == [6, ""]
        pairs, wrong = result["second"]
        assert pairs == 0
        assert "write of rank 2 in the memory of rank 0: " in wrong


@pytest.mark.process
@needs_triton
# Not bfloat16, which the interpreter does not round but cut.
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fused_sums_are_right_call_after_call_whatever_their_sizes(dtype):
    shapes = [(1, 64), (1, 64), (1, 64), (5, 40), (2, 40), (PROGRAMS + 4, 16), (1, 64), (5, 40)]
    for result in run_world("fused", 2, dtype=dtype, shapes=shapes):
        assert result == {"errors": [], "lost": None}


@pytest.mark.process
@needs_triton
def test_a_rank_that_is_a_call_ahead_overwrites_nothing_that_is_still_read():
    for result in run_world("peer_a_call_ahead", 2, dtype="float32", shapes=[(1, 32)] * 5):
        assert result == {"errors": [], "lost": None}


@pytest.mark.slow
@pytest.mark.process
@needs_triton
def test_fused_sums_of_three_ranks_are_right():
    for result in run_world("fused", 3, dtype="float32", shapes=[(2, 48)] * 5):
        assert result == {"errors": [], "lost": None}


@pytest.mark.process
@needs_triton
def test_a_peer_that_stays_away_is_named_and_gives_no_numbers():
    first, _ = run_world("peer_stays_away", 2)
    assert first == {"lost": 1, "numbers": 0}
