"""Groups of one, virtual groups, and that a wrong sum cannot pass the verification."""

import threading
from dataclasses import replace

import pytest
import torch

from tests.support.model_steps import run_ranks
from vcli.runtime.distributed.collectives import all_gather, all_reduce, barrier
from vcli.runtime.distributed.group import single_rank_group
from vcli.runtime.distributed.parallel_state import comm_backend, single_rank_context
from vcli.runtime.distributed.verify import verify_all_reduce, verify_groups
from vcli.runtime.distributed.virtual import virtual_groups


def test_a_group_of_one_returns_its_tensor_untouched():
    group, tensor = single_rank_group("TP", 3), torch.arange(4.0)
    assert all_reduce(tensor, group) is tensor
    assert all_gather(tensor, group) is tensor
    barrier(group)


def test_a_rank_alone_reports_itself():
    (report,) = verify_groups(single_rank_context(), "cpu")
    assert (report.kind, report.ranks, report.transport) == ("TP", [0], "self")
    assert report.verified


def test_the_device_decides_what_moves_tensors():
    assert (comm_backend("cpu"), comm_backend("cuda")) == ("gloo", "nccl")


def verify_with(change, size=4):
    """Reports of all ranks whose communicator's sums `change` has altered."""

    class Broken:
        name = "broken"

        def __init__(self, inner, rank_in_group):
            self.inner, self.rank_in_group = inner, rank_in_group

        def all_reduce(self, tensor):
            return change(self.inner.all_reduce, tensor, self.rank_in_group)

    groups = [
        replace(group, communicator=Broken(group.communicator, group.rank_in_group))
        for group in virtual_groups("TP", size)
    ]
    return run_ranks([lambda g=g: verify_all_reduce(g, "cpu") for g in groups])


def test_right_sums_are_verified():
    for report in verify_with(lambda sum_up, tensor, rank: sum_up(tensor)):
        assert report.verified
        assert report.note == ""
        assert report.all_reduce_us > 0
        assert report.all_reduce_bytes == 64 * 1024


def one_element_off(sum_up, tensor, rank):
    summed = sum_up(tensor)
    summed[1000] += 1
    return summed


def first_rank_is_missing(sum_up, tensor, rank):
    return sum_up(tensor * (rank != 0))


def two_ranks_swapped_roles(sum_up, tensor, rank):
    """Rank 0 counts twice and rank 3 not at all."""
    return sum_up(tensor * {0: 2, 3: 0}.get(rank, 1))


def halves_are_swapped(sum_up, tensor, rank):
    return sum_up(tensor).roll(len(tensor) // 2)


def nothing_is_summed(sum_up, tensor, rank):
    sum_up(tensor.clone())
    return tensor


@pytest.mark.parametrize(
    "change",
    [
        one_element_off,
        first_rank_is_missing,
        two_ranks_swapped_roles,
        halves_are_swapped,
        nothing_is_summed,
    ],
)
def test_wrong_sums_are_found(change):
    for report in verify_with(change):
        assert not report.verified
        assert "sums are wrong: element" in report.note


def test_virtual_sums_are_the_same_bits_on_all_ranks():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(50, generator=generator) for _ in range(4)]
    groups = virtual_groups("TP", 4)
    results = run_ranks(
        [lambda g=g, t=t: all_reduce(t.clone(), g) for g, t in zip(groups, tensors, strict=True)]
    )
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], torch.stack(tensors).sum(0))


def test_a_virtual_rank_that_does_not_come_breaks_the_others():
    first, _ = virtual_groups("TP", 2, timeout_s=0.05)
    with pytest.raises(threading.BrokenBarrierError):
        all_reduce(torch.ones(2), first)
