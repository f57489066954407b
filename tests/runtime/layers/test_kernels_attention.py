"""The Triton kernels of attention against plain torch; see `tests.support.kernel_cases`."""

import itertools

import pytest
import torch

from tests.support.kernel_cases import (
    BLOCK_SIZE,
    DEVICE,
    DTYPES,
    KERNEL_MARKS,
    NAN,
    PagedCache,
    assert_near,
    ints,
    randn,
)
from vcli.runtime.layers.attention import ForwardMetadata
from vcli.runtime.layers.attention_triton import TritonAttention
from vcli.runtime.layers.kernels import DecodeWorkspace, paged_decode, paged_prefill, plan_decode
from vcli.runtime.layers.kernels.decode_plan import COUNT, END, FIRST, ROW, START, DecodeTuning

pytestmark = KERNEL_MARKS


def planned(workspace, rows, seq_lens):
    plan = workspace.plan(len(seq_lens))
    plan_decode(plan, rows, ints(seq_lens))
    return plan


@pytest.mark.parametrize("num_programs", [1, 8, 40, 500])
@pytest.mark.parametrize(
    "seq_lens",
    [[1700], [0, 5], [1, 16, 17, 0, 900, 33, 400], [37 * index % 301 for index in range(40)]],
)
def test_a_plan_cuts_every_context_into_even_splits_and_no_more(num_programs, seq_lens):
    tuning = DecodeTuning(tile=16, min_split_tokens=20, num_programs=num_programs)
    workspace = DecodeWorkspace(40, 8, 2, 64, DEVICE, tuning)
    rows = [40 + 3 * index for index in range(len(seq_lens))]
    plan = planned(workspace, ints(rows), seq_lens)
    fields = plan.work.view(6, plan.num_items).T.tolist()
    items = [item for item in fields if item[0] >= 0]
    assert fields == items + [item for item in fields if item[0] < 0]
    for request, (row, length) in enumerate(zip(rows, seq_lens, strict=True)):
        own = [item for item in items if item[0] == request]
        first = items.index(own[0])
        assert items[first : first + len(own)] == own
        assert {(item[ROW], item[FIRST], item[COUNT]) for item in own} == {(row, first, len(own))}
        edges = [0, *(item[END] for item in own)]
        assert [item[START] for item in own] == edges[:-1]
        assert edges[-1] == length
        assert all(edge % 16 == 0 for edge in edges[:-1])
        sizes = [item[END] - item[START] for item in own]
        assert len(set(sizes[:-1])) <= 1, "even but for the last"
        assert 0 < sizes[-1] <= sizes[0] or length == 0
    sizes = [item[END] - item[START] for item in items if item[START] == 0]
    assert all(a >= b - 15 for a, b in itertools.pairwise(sizes)), "the longest first"
    fair = max(sum(seq_lens) / max(num_programs // 2, 1), max(seq_lens) / 64, 20)
    assert max(sizes) <= -(-fair // 16) * 16, "splits as short as programs were asked for"
    # Cut no more than that asks for: splits in the middle fill at least half of it.
    assert all(2 * size >= min(fair, 32) - 15 for size in sizes if size not in seq_lens)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "num_requests"),
    [(4, 2, 128, 5), (4, 2, 128, 20), (4, 4, 128, 33), (4, 2, 256, 3), (2, 2, 256, 65)],
)
def test_the_tunings_for_any_number_of_requests_and_size_of_heads(
    heads, kv_heads, head_size, num_requests
):
    seq_lens = [1 + 29 * index % 83 for index in range(num_requests - 1)] + [300]
    paged = PagedCache(seq_lens, kv_heads, head_size)
    query = randn(num_requests, heads, head_size)
    workspace = DecodeWorkspace(num_requests, heads, kv_heads, head_size, DEVICE)
    plan = planned(workspace, paged.rows, seq_lens)
    output = paged_decode(query, paged.cache, paged.tables, plan, 0.1)
    for index in range(num_requests):
        assert_near(output[index], paged.attend(index, query[index : index + 1], 0.1)[0])
    assert not workspace.tickets.any()


SMALL_SPLITS = DecodeTuning(tile=16, num_warps=2, num_stages=2, min_split_tokens=16)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [(8, 2, 64), (7, 1, 128), (4, 4, 64), (4, 2, 256), (20, 1, 64)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_is_right_for_any_number_of_splits(heads, kv_heads, head_size, dtype):
    seq_lens = [1, 100, 16, 33]
    paged = PagedCache(seq_lens, kv_heads, head_size, dtype)
    query = randn(len(seq_lens), heads, head_size, dtype=dtype)
    expected = torch.cat(
        [paged.attend(index, query[index : index + 1], 0.1) for index in range(len(seq_lens))]
    )
    for num_programs in (1, 20, 32 * kv_heads):
        tuning = DecodeTuning(
            tile=16, num_warps=2, num_stages=2, min_split_tokens=16, num_programs=num_programs
        )
        workspace = DecodeWorkspace(8, heads, kv_heads, head_size, DEVICE, tuning)
        for _ in range(2):
            plan = planned(workspace, paged.rows, seq_lens)
            output = paged_decode(query, paged.cache, paged.tables, plan, 0.1)
            assert_near(output, expected)
        assert not workspace.tickets.any()


def test_decode_with_the_default_tuning_merges_a_long_context_and_zeroes_padding():
    seq_lens = [700, 0, 33]
    paged = PagedCache(seq_lens, 2, 64)
    query = randn(3, 8, 64)
    workspace = DecodeWorkspace(3, 8, 2, 64, DEVICE)
    plan = planned(workspace, paged.rows, seq_lens)
    output = paged_decode(query, paged.cache, paged.tables, plan, 0.125)
    assert_near(output[0], paged.attend(0, query[:1], 0.125)[0])
    assert not output[1].any()
    assert_near(output[2], paged.attend(2, query[2:], 0.125)[0])


def test_a_cache_stored_heads_first_gives_the_same():
    paged = PagedCache([40, 7], 2, 64, heads_first=True)
    query = randn(2, 4, 64)
    workspace = DecodeWorkspace(2, 4, 2, 64, DEVICE, SMALL_SPLITS)
    arguments = (paged.cache, paged.tables, paged.rows)
    plan = planned(workspace, paged.rows, [40, 7])
    output = paged_decode(query, paged.cache, paged.tables, plan, 0.125)
    for index in range(2):
        assert_near(output[index], paged.attend(index, query[index : index + 1], 0.125)[0])
    starts = ints([0, 1, 2])
    output = paged_prefill(query, *arguments, starts, ints([40, 7]), 1, 0.125)
    for index in range(2):
        assert_near(output[index], paged.attend(index, query[index : index + 1], 0.125)[0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(8, 2, 64), (7, 1, 128), (3, 3, 64), (4, 2, 256)]
)
def test_prefill_of_mixed_chunks_equals_the_written_out_attention(heads, kv_heads, head_size):
    chunks = [(70, 70), (130, 1), (90, 20), (16, 0), (1, 1), (200, 65)]
    paged = PagedCache([length for length, _ in chunks], kv_heads, head_size)
    starts = [0]
    for _, count in chunks:
        starts.append(starts[-1] + count)
    query = randn(starts[-1], heads, head_size)
    output = paged_prefill(
        query,
        paged.cache,
        paged.tables,
        paged.rows,
        ints(starts),
        ints([length for length, _ in chunks]),
        70,
        0.1,
    )
    for index, (_, count) in enumerate(chunks):
        rows = slice(starts[index], starts[index + 1])
        if count:
            assert_near(output[rows], paged.attend(index, query[rows], 0.1))


@pytest.mark.parametrize(
    ("chunks", "alone"),
    [
        ([(90, 20), (16, 16), (5, 1), (70, 1), (33, 1), (40, 3), (6, 1)], range(2, 5)),
        ([(70, 1), (90, 20), (33, 1)], range(1)),
        ([(90, 20), (70, 1), (33, 1)], range(1, 3)),
        ([(90, 20), (16, 16)], range(0)),
        ([(90, 1), (16, 1)], range(2)),
    ],
)
def test_decodes_among_chunks_are_attended_to_with_them(chunks, alone):
    lens, counts = [length for length, _ in chunks], [count for _, count in chunks]
    starts = [0, *itertools.accumulate(counts)]
    paged = PagedCache(lens, 2, 64)
    query = randn(starts[-1], 8, 64)
    backend = TritonAttention(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    plan = backend.plan(
        ForwardMetadata(
            num_tokens=starts[-1],
            num_requests=len(chunks),
            query_start_loc=ints(starts),
            seq_lens=ints(lens),
            block_tables=paged.tables,
            rows=paged.rows,
            slot_mapping=ints([0] * starts[-1], torch.int64),
            block_size=BLOCK_SIZE,
            max_query_len=max(counts),
            max_seq_len=max(lens),
            query_lens_cpu=counts,
            seq_lens_cpu=lens,
        )
    )
    assert plan.alone == alone
    assert plan.decodes.num_requests == len(alone)
    backend.begin(plan)
    output = backend.attend(query, paged.cache, plan, 0.1)
    for index in range(len(chunks)):
        rows = slice(starts[index], starts[index + 1])
        assert_near(output[rows], paged.attend(index, query[rows], 0.1))
    # The next layer has another cache, and what it gives goes where it is told.
    other = paged.cache.clone()
    other[1] *= 2
    written = torch.full_like(query, NAN)
    assert backend.attend(query, other, plan, 0.1, written) is written
    assert_near(written, 2 * output)
