"""The Triton kernels against plain torch: on a GPU where there is one, else interpreted.

Interpreted: TRITON_INTERPRET=1, with triton and a numpy below 2.4 on the path.
"""

import itertools
import os

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from vcli.runtime.layers import activation, norm
from vcli.runtime.layers.attention import ForwardMetadata
from vcli.runtime.layers.attention_triton import TritonAttention
from vcli.runtime.layers.kernels import (
    DecodeWorkspace,
    add_rms_norm,
    can_use_skinny,
    paged_decode,
    paged_prefill,
    plan_decode,
    prepare_decode,
    rope_and_cache,
    sample_rows,
    sampling,
    silu_and_mul,
    skinny_linear,
)
from vcli.runtime.layers.kernels.decode_plan import COUNT, END, FIRST, ROW, START, DecodeTuning
from vcli.runtime.layers.kernels.skinny_linear import MatrixTuning, VectorTuning

# The interpreter turns arrays of one element into numbers, which numpy 2.4 refuses.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts bfloat16 instead of rounding it, and multiplies its bits as integers.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
DTYPE = DTYPES[-1]
BLOCK_SIZE = 16
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_near(actual, expected, tolerance=1e-2):
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, f"relative error {error:.2e}"


class PagedCache:
    """Contexts of some requests in scattered blocks; whatever no request owns is NaN."""

    def __init__(self, seq_lens, kv_heads, head_size, dtype=DTYPE, *, heads_first=False):
        self.seq_lens, self.num_rows = seq_lens, len(seq_lens) + 2
        needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
        num_blocks, width = sum(needed) + 3, max(needed) + 2
        shape = (2, num_blocks, BLOCK_SIZE, kv_heads, head_size)
        if heads_first:
            stored = torch.full((*shape[:2], kv_heads, BLOCK_SIZE, head_size), NAN, dtype=dtype)
            self.cache = stored.to(DEVICE).transpose(2, 3)
        else:
            self.cache = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
        free = torch.randperm(num_blocks).tolist()
        # Columns past a request's blocks name blocks that do not exist.
        tables = torch.full((self.num_rows, width), 2**30, dtype=torch.int32)
        self.rows = torch.randperm(self.num_rows)[: len(seq_lens)].int()
        self.keys, self.values = [], []
        for row, length, count in zip(self.rows.tolist(), seq_lens, needed, strict=True):
            blocks = [free.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            key, value = (randn(length, kv_heads, head_size, dtype=dtype) for _ in range(2))
            self.keys.append(key)
            self.values.append(value)
            for position in range(length):
                block, offset = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.cache[0, block, offset] = key[position]
                self.cache[1, block, offset] = value[position]
        self.tables, self.rows = tables.to(DEVICE), self.rows.to(DEVICE)

    def attend(self, request, query_QHE, scale):
        """Causal attention of the last tokens of a request, in float64."""
        group = query_QHE.shape[1] // self.keys[request].shape[1]
        key = self.keys[request].double().repeat_interleave(group, 1)
        value = self.values[request].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhe,lhe->hql", query_QHE.double(), key) * scale
        count, length = len(query_QHE), len(key)
        position = torch.arange(length - count, length, device=DEVICE)
        hidden = torch.arange(length, device=DEVICE)[None, :] > position[:, None]
        weights = scores.masked_fill(hidden, -INF).softmax(-1)
        return torch.einsum("hql,lhe->qhe", weights, value)


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
    backend = TritonAttention(num_heads=8, num_kv_heads=2, head_size=64)
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


@pytest.mark.parametrize("size", [128, 1000, 4096])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_rounds_as_the_layer_does(size, has_residual):
    layer = norm.RMSNorm(size, 1e-6, dtype=DTYPE, device=DEVICE)
    layer.weight.copy_(randn(size))
    x, residual = randn(5, size), randn(5, size) if has_residual else None
    expected, expected_sum = layer.add_and_norm(x, residual)
    normed, summed = add_rms_norm(x.clone(), residual, layer.weight, 1e-6)
    assert torch.equal(summed, expected_sum)
    # The order of a sum may move a value over the edge of a rounding.
    assert (normed != expected).float().mean() < 0.01
    torch.testing.assert_close(normed, expected, rtol=2**-6, atol=0.0)


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(8, 2, 64), (7, 1, 128), (3, 3, 256)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_turns_queries_and_keys_and_fills_the_cache(heads, kv_heads, head_size, has_norm):
    num_tokens, half = 6, head_size // 2
    qkv = randn(num_tokens, heads + 2 * kv_heads, head_size)
    angles = torch.arange(50)[:, None] * 0.01 ** (torch.arange(half) / half)
    table = torch.cat((angles.cos(), angles.sin()), 1).float().to(DEVICE)
    positions, slots = [0, 7, 49, 3, 4, 5], [5, 17, -1, 40, 0, 31]
    q_norm, k_norm = (randn(head_size), randn(head_size)) if has_norm else (None, None)
    cache = torch.zeros(2, 3, BLOCK_SIZE, kv_heads, head_size, dtype=qkv.dtype, device=DEVICE)
    query = rope_and_cache(
        qkv,
        ints(positions, torch.int64),
        table,
        q_norm,
        k_norm,
        1e-6,
        ints(slots, torch.int64),
        cache,
        heads,
    )
    turned = qkv.double()
    if has_norm:
        turned = turned / (turned.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        turned[:, :heads] *= q_norm.double()
        turned[:, heads : heads + kv_heads] *= k_norm.double()
    cos, sin = table[ints(positions).long()].double()[:, None].chunk(2, -1)
    first, second = turned.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert_near(query, turned[:, :heads])
    expected = torch.zeros_like(cache).double().flatten(1, 2)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot] = turned[token, heads : heads + kv_heads]
            expected[1, slot] = qkv[token, heads + kv_heads :].double()
    assert_near(cache.flatten(1, 2)[0], expected[0])
    assert torch.equal(cache.flatten(1, 2)[1].double(), expected[1])


@pytest.mark.parametrize("size", [48, 1024, 1500])
def test_activation_rounds_as_the_layer_does(size):
    gate_up = randn(3, 2 * size)
    expected = activation.silu_and_mul(gate_up)
    torch.testing.assert_close(silu_and_mul(gate_up), expected, rtol=2**-6, atol=1e-30)


def seed_of(value):
    return ints([value], torch.int64)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_temperature_0_takes_the_first_of_the_largest(dtype):
    logits = randn(3, 5003, dtype=dtype)
    logits[0, [17, 4000]] = 50.0
    logits[1, 5002] = 50.0
    logits[2, 0] = -INF
    best, index = sample_rows(logits, torch.zeros(3, device=DEVICE), seed_of(1), 0, 5003)
    assert index.tolist() == [17, 5002, int(logits[2].float().argmax())]
    assert torch.equal(best, logits.float().amax(1))


def test_padding_of_the_vocabulary_never_wins():
    logits = randn(2, 2048, dtype=torch.float32)
    logits[:, 1500:] = NAN
    for start in (0, 100):
        best, index = sample_rows(logits, ints([0, 1]).float(), seed_of(3), start, start + 1500)
        assert best.isfinite().all()
        assert ((index >= start) & (index < start + 1500)).all()
    best, _ = sample_rows(logits, ints([0, 1]).float(), seed_of(3), 4096, 4096)
    assert (best == -INF).all()


def sample_shards(logits, temperatures, seed, vocab_size, cuts):
    """The best of the shards that end at `cuts` and at the last column."""
    edges = [0, *cuts, logits.shape[1]]
    shards = [
        sample_rows(logits[:, a:b], temperatures, seed, a, vocab_size)
        for a, b in itertools.pairwise(edges)
    ]
    best, winner = torch.stack([shard[0] for shard in shards]).max(0)
    index = torch.stack([shard[1] for shard in shards]).gather(0, winner[None])[0]
    return best, index


@pytest.mark.parametrize("cuts", [[16], [1024], [1296, 2064], [2048]])
def test_shards_of_whole_groups_choose_what_the_whole_vocabulary_chooses(cuts):
    logits = randn(4, 3000, dtype=torch.float32)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0], device=DEVICE)
    best, index = sample_rows(logits, temperatures, seed_of(2**40 + 5), 0, 2990)
    shard_best, shard_index = sample_shards(logits, temperatures, seed_of(2**40 + 5), 2990, cuts)
    assert torch.equal(shard_index, index)
    assert torch.equal(shard_best, best)


def test_one_program_of_a_row_chooses_what_many_do(monkeypatch):
    logits = randn(4, 7000, dtype=torch.float32)
    logits[3, 5] = NAN
    temperatures = torch.tensor([0.0, 0.5, 2.0, 1.0], device=DEVICE)
    best, index = sample_rows(logits, temperatures, seed_of(8), 0, 7000)
    monkeypatch.setattr(sampling, "NUM_PROGRAMS", 1)
    one_best, one_index = sample_rows(logits, temperatures, seed_of(8), 0, 7000)
    assert torch.equal(one_index, index)
    assert torch.equal(one_best[:3], best[:3])
    assert best[3].isnan() & one_best[3].isnan()


def test_seeds_and_rows_draw_differently_and_repeatably():
    logits = torch.zeros(24, 2000, device=DEVICE)
    ones = torch.ones(24, device=DEVICE)
    first, second = (sample_rows(logits, ones, seed_of(9), 0, 2000)[1] for _ in range(2))
    other = sample_rows(logits, ones, seed_of(10), 0, 2000)[1]
    assert torch.equal(first, second)
    assert len(set(first.tolist())) > 20
    assert (first == other).sum() < 4


#: The interpreter takes 30 ms for a draw.
NUM_DRAWS = 20000 if DEVICE == "cuda" else 120


def weights_of(size, tokens):
    """Weights (size,): each total of `tokens` spread evenly over its ids."""
    weights = torch.zeros(size)
    for places, total in tokens.items():
        weights[list(places)] = total / len(places)
    assert abs(weights.sum() - 1) < 1e-5
    return weights.to(DEVICE)


def assert_drawn_by(weights, draw):
    """Chi-square of the ids that `draw` takes from rows of logits at temperature 2."""
    logits = (2.0 * torch.log(weights)).expand(NUM_DRAWS, -1).contiguous()
    _, index = draw(logits, torch.full((NUM_DRAWS,), 2.0, device=DEVICE))
    counts = torch.bincount(index.long(), minlength=len(weights)).double()
    expected = weights.double() * NUM_DRAWS
    assert counts[expected == 0].sum() == 0
    is_drawn = expected > 0
    chi = ((counts - expected)[is_drawn] ** 2 / expected[is_drawn]).sum()
    degrees = int(is_drawn.sum()) - 1
    assert chi < degrees + 4 * (2 * degrees) ** 0.5, f"chi-square {chi:.1f} of {degrees} degrees"


def test_draws_follow_the_softmax():
    # One group even, one of two tokens, one empty, one of a single token, one that ends early.
    heavy = {tuple(range(16)): 0.5, (17,): 0.2, (30,): 0.1}
    weights = weights_of(70, {**heavy, (48,): 0.15, (64, 69): 0.05})
    assert_drawn_by(weights, lambda *rows: sample_rows(*rows, seed_of(77), 0, 70))


def test_the_token_of_a_group_does_not_depend_on_the_groups_noise():
    # Product of 0.5 0.3 0.2 in each group and of 0.4 0.3 0.2 0.1 over the groups. The first
    # group's tokens have the numbers of the groups.
    first = {(0,): 0.2, (1,): 0.12, (2,): 0.08}
    others = {
        (16 * group + token,): within * share
        for group, share in ((1, 0.3), (2, 0.2), (3, 0.1))
        for token, within in ((0, 0.5), (7, 0.3), (15, 0.2))
    }
    assert_drawn_by(
        weights_of(64, first | others), lambda *rows: sample_rows(*rows, seed_of(3), 0, 64)
    )


def test_shards_that_cut_groups_draw_by_the_softmax():
    # Two shards start at the fifth token of a group: their parts of one group are equally heavy.
    weights = weights_of(48, {(2,): 0.1, (16, 20): 0.4, (21, 31): 0.4, (40,): 0.1})
    assert_drawn_by(weights, lambda *rows: sample_shards(*rows, seed_of(5), 48, [5, 21]))


def test_greedy_shards_may_be_cut_anywhere():
    logits = randn(3, 100, dtype=torch.float32)
    logits[0, 18:24] = 9.0
    best, index = sample_shards(logits, torch.zeros(3, device=DEVICE), seed_of(1), 100, [21, 37])
    assert index.tolist() == [18, *logits[1:].argmax(1).tolist()]
    assert torch.equal(best, logits.amax(1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_show_as_nan(temperature):
    logits = randn(4, 3000, dtype=torch.float32)
    logits[0, 2999] = NAN
    logits[1, 5] = INF
    logits[2] = -INF
    temperatures = torch.full((4,), temperature, device=DEVICE)
    best, index = sample_rows(logits, temperatures, seed_of(1), 0, 3000)
    assert best.isnan().tolist() == [True, True, True, False]
    assert ((index >= 0) & (index < 3000)).all()


@pytest.mark.parametrize("scale", [30, 3e4, 1e9])
def test_a_tiny_temperature_is_greedy_and_finite(scale):
    logits = randn(2, 3000, dtype=torch.float32) * scale
    tiny = torch.full((2,), 1e-30, device=DEVICE)
    best, index = sample_rows(logits, tiny, seed_of(1), 0, 3000)
    assert best.isfinite().all()
    assert torch.equal(index.long(), logits.argmax(1))


def test_prepare_decode_enters_new_blocks_and_reads_last_tokens():
    num_requests = 70
    tables = ints([[row * 10 + column for column in range(4)] for row in range(80)])
    last_token = torch.arange(80, device=DEVICE) + 1000
    packed = torch.zeros(5, num_requests, dtype=torch.int32)
    packed[0] = torch.randperm(80)[:num_requests]
    packed[1], packed[2], packed[3] = 20, -1, -1
    packed[1:5, 0] = torch.tensor([33, 5, 2, 777])
    packed[1:5, 1] = torch.tensor([32, -1, 2, 778])
    packed[:, 69] = torch.tensor([0, 0, -1, -1, 0])
    expected = tables.clone()
    expected[int(packed[0, 0]), 2], expected[int(packed[0, 1]), 2] = 777, 778
    out = {
        name: torch.full((num_requests,), 99, dtype=dtype, device=DEVICE)
        for name, dtype in (
            ("input_ids_R", torch.int64),
            ("positions_R", torch.int64),
            ("slot_mapping_R", torch.int64),
            ("rows_R", torch.int32),
            ("seq_lens_R", torch.int32),
        )
    }
    prepare_decode(packed.to(DEVICE), tables, last_token, BLOCK_SIZE, **out)
    assert torch.equal(tables, expected)
    rows = packed[0].tolist()
    assert out["input_ids_R"].tolist() == [5, *(1000 + row for row in rows[1:69]), 0]
    assert out["positions_R"].tolist() == [32, 31, *[19] * 67, 0]
    slots = [777 * 16, (rows[1] * 10 + 1) * 16 + 15, *((r * 10 + 1) * 16 + 3 for r in rows[2:69])]
    assert out["slot_mapping_R"].tolist() == [*slots, -1]
    assert out["rows_R"].tolist() == rows
    assert out["seq_lens_R"].tolist() == packed[1].tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 256), (50, 2056), (100, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_skinny_linear_equals_the_plain_one(num_rows, num_outputs, num_inputs, has_bias):
    x, weight = randn(num_rows, num_inputs), randn(num_outputs, num_inputs)
    bias = randn(num_outputs) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = torch.full((num_rows, num_outputs), NAN, dtype=x.dtype, device=DEVICE)
    assert skinny_linear(x, weight, bias, out) is out
    assert_near(out, expected)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("num_inputs", [128, 384, 200])
def test_one_row_is_right_however_far_the_weight_is_read_ahead(ahead, num_inputs):
    x, weight = randn(1, num_inputs), randn(9, num_inputs)
    tuning = VectorTuning(outputs=2, inputs=128, num_warps=1, ahead=ahead)
    assert_near(skinny_linear(x, weight, tuning=tuning), F.linear(x.double(), weight.double()))


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_inputs_split_over_programs_sum_up_again_and_again(num_splits):
    x, weight = randn(5, 1000), randn(150, 1000)
    tuning = MatrixTuning(num_splits=num_splits, num_stages=2)
    for _ in range(3):
        assert_near(skinny_linear(x, weight, tuning=tuning), F.linear(x.double(), weight.double()))


def test_few_rows_of_an_uneven_weight_are_left_to_cublas():
    assert can_use_skinny(1, 4096, 4095)
    assert can_use_skinny(32, 4096, 4096)
    assert not can_use_skinny(32, 4096, 4095)
    assert can_use_skinny(64, 28672, 4096)
    assert not any(can_use_skinny(rows, 4096, 4096) for rows in (33, 64, 1000))
