"""The attention for Hopper GPUs against plain torch, and when it is used."""

import gc
import itertools
import logging

import pytest
import torch

from tests.support.kernel_cases import DEVICE, NAN, PagedCache, assert_near, ints, randn
from vcli.runtime.layers.kernels import (
    DecodeWorkspace,
    hopper_check,
    paged_decode,
    paged_prefill,
    plan_decode,
)
from vcli.runtime.layers.kernels.decode_plan import DecodeTuning
from vcli.runtime.layers.kernels.hopper_check import (
    AttentionSizes,
    decodes_by_pages,
    prefills_by_pages,
)
from vcli.runtime.layers.kernels.launch import PdlSwitch

IS_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9")
pytestmark = pytest.mark.usefixtures("seeded")

DTYPES = [torch.bfloat16, torch.float16]


def decode(paged, query, scale, num_programs, num_stages=3):
    num_requests, heads, head_size = query.shape
    tuning = DecodeTuning(tile=64, num_stages=num_stages, num_programs=num_programs, by_pages=True)
    workspace = DecodeWorkspace(
        num_requests, heads, paged.cache.shape[3], head_size, DEVICE, tuning
    )
    plan = workspace.plan(num_requests)
    plan_decode(plan, paged.rows, ints(paged.seq_lens))
    output = torch.full_like(query, NAN)
    paged_decode(query, paged.cache, paged.tables, plan, scale, output)
    assert not workspace.tickets.any()
    return output


def check_decode(paged, query, output, scale):
    for index, length in enumerate(paged.seq_lens):
        if not length:
            assert not output[index].any()
        else:
            expected = paged.attend(index, query[index : index + 1], scale)[0]
            assert_near(output[index], expected)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [(32, 8, 128), (8, 2, 64), (7, 1, 128), (4, 4, 64), (4, 2, 256), (20, 1, 64), (16, 1, 128)],
)
def test_decode_with_any_number_of_splits_and_any_end_of_a_context(
    heads, kv_heads, head_size, dtype
):
    seq_lens = [1, 15, 16, 17, 63, 64, 65, 127, 0, 129, 700, 2000]
    paged = PagedCache(seq_lens, kv_heads, head_size, dtype)
    query = randn(len(seq_lens), heads, head_size, dtype=dtype)
    for num_programs in (1, 8 * kv_heads, 40 * kv_heads, 1056):
        check_decode(paged, query, decode(paged, query, 0.1, num_programs, 2), 0.1)


@on_hopper
def test_decodes_of_many_requests_at_once():
    seq_lens = [1 + 37 * index % 1500 for index in range(256)]
    paged = PagedCache(seq_lens, 8, 128)
    query = randn(256, 32, 128)
    check_decode(paged, query, decode(paged, query, 128**-0.5, 264), 128**-0.5)


@on_hopper
def test_one_long_context_is_merged_from_many_splits():
    paged = PagedCache([9000], 2, 128)
    query = randn(1, 8, 128)
    check_decode(paged, query, decode(paged, query, 0.1, 1056), 0.1)


@on_hopper
@pytest.mark.parametrize("overlaps", [False, True])
def test_decode_reads_the_query_and_the_last_token_that_the_kernel_before_it_writes(
    monkeypatch, overlaps
):
    monkeypatch.setattr(PdlSwitch, "is_on", overlaps)
    seq_lens = [800] * 64
    paged = PagedCache(seq_lens, 4, 128)
    query = randn(64, 16, 128)
    expected = decode(paged, query, 0.1, 264)
    blocks = torch.stack([paged.tables[row, 799 // 16] for row in paged.rows.tolist()]).long()
    last = paged.cache[:, blocks, 15].clone()
    for _ in range(20):
        paged.cache[:, blocks, 15] = NAN
        late = torch.full_like(query, NAN)
        torch.cuda.synchronize()
        paged.cache[:, blocks, 15] = last
        late.copy_(query)
        assert torch.equal(decode(paged, late, 0.1, 264), expected)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(32, 8, 128), (8, 2, 64), (7, 1, 128), (4, 4, 64)]
)
def test_prefill_of_mixed_chunks(heads, kv_heads, head_size, dtype):
    chunks = [(70, 70), (130, 1), (90, 20), (16, 0), (1, 1), (64, 64), (700, 500), (1500, 65)]
    lens, counts = [length for length, _ in chunks], [count for _, count in chunks]
    starts = [0, *itertools.accumulate(counts)]
    paged = PagedCache(lens, kv_heads, head_size, dtype)
    query = randn(starts[-1], heads, head_size, dtype=dtype)
    arguments = (paged.cache, paged.tables, paged.rows, ints(starts), ints(lens), max(counts), 0.1)
    output = paged_prefill(query, *arguments, by_pages=True)
    for index in range(len(chunks)):
        rows = slice(starts[index], starts[index + 1])
        if counts[index]:
            assert_near(output[rows], paged.attend(index, query[rows], 0.1))
    untouched = torch.full_like(query, NAN)
    paged_prefill(query, *arguments, out=untouched, skipped=range(2, 7), by_pages=True)
    assert untouched[starts[2] : starts[7]].isnan().all()
    for rows in (slice(0, starts[2]), slice(starts[7], None)):
        assert torch.equal(untouched[rows], output[rows])


@on_hopper
@pytest.mark.parametrize(("group", "head_size"), [(4, 128), (2, 64), (1, 256)])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_a_hopper_gpu_is_found_to_attend_by_pages(group, head_size, block_size):
    for dtype in DTYPES:
        sizes = AttentionSizes(group, head_size, block_size, dtype, torch.device("cuda", 0))
        assert hopper_check._decode_error(sizes) < 4e-3
        assert decodes_by_pages(sizes)
        assert prefills_by_pages(sizes) == (head_size <= 128)
        if head_size <= 128:
            assert hopper_check._prefill_error(sizes) < 4e-3


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_cache_is_described_once_and_not_kept(is_inference):
    from vcli.runtime.layers.kernels.page_fetch import Descriptors

    descriptors = Descriptors()
    cache = torch.zeros(2, 3, 16, 2, 64, dtype=DTYPES[0], device=DEVICE)
    with torch.inference_mode(is_inference):
        assert descriptors.of(cache) is descriptors.of(cache)
        other = descriptors.of(torch.zeros_like(cache))
    assert list(other.shape) == [2 * 3 * 16, 2 * 64]
    assert len(descriptors) == 1
    del cache
    gc.collect()
    assert len(descriptors) == 0


def sizes_on(device, group=4, head_size=128, block_size=16):
    return AttentionSizes(group, head_size, block_size, torch.bfloat16, torch.device(device))


def never(sizes):
    pytest.fail(f"tried with {sizes}")


@pytest.fixture(params=["decode", "prefill"])
def tried(request):
    """The check and the name of its measurement."""
    check = {"decode": decodes_by_pages, "prefill": prefills_by_pages}[request.param]
    return check.__wrapped__, f"_{request.param}_error"


@pytest.mark.parametrize(
    "sizes",
    [{"head_size": 512}, {"head_size": 96}, {"block_size": 128}, {"block_size": 4}],
)
def test_sizes_without_a_kernel_are_left_to_the_general_one(monkeypatch, tried, sizes):
    is_right, measurement = tried
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hopper_check, measurement, never)
    assert not is_right(sizes_on("cuda:0", **sizes))


def test_more_query_heads_than_a_decode_has_room_for_are_left_to_the_general_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    measured = []
    monkeypatch.setattr(hopper_check, "_decode_error", lambda sizes: measured.append(sizes) or 0.0)
    assert decodes_by_pages.__wrapped__(sizes_on("cuda:0", group=32))
    assert not decodes_by_pages.__wrapped__(sizes_on("cuda:0", group=33))
    assert [sizes.group for sizes in measured] == [32]


@pytest.mark.parametrize(
    ("device", "capability"), [("cpu", (9, 0)), ("cuda:0", (8, 0)), ("cuda:0", (10, 0))]
)
def test_other_devices_are_left_to_the_general_one(monkeypatch, tried, device, capability):
    is_right, measurement = tried
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(hopper_check, measurement, never)
    assert not is_right(sizes_on(device))


@pytest.mark.parametrize("error", [0.3, NAN, RuntimeError("no such instruction")])
def test_a_kernel_that_fails_or_is_wrong_is_named_and_not_used(monkeypatch, caplog, tried, error):
    def measured(sizes):
        if isinstance(error, Exception):
            raise error
        return error

    is_right, measurement = tried
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hopper_check, measurement, measured)
    with caplog.at_level(logging.WARNING):
        assert not is_right(sizes_on("cuda:0"))
    assert "the one for all GPUs is used" in caplog.text
    assert (str(error) if isinstance(error, Exception) else f"{error:.2g}") in caplog.text
