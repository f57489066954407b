# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""One token for each row of logits: the largest, or one drawn by the Gumbel-max trick.

Drawn in two levels, which is exact and spares most of the noise: first a group of 16 tokens by the
log of its total weight, then a token of that group. The noise depends on the seed, the row's
position and the id of the group or token alone, so shards of whole groups choose what the whole
vocabulary would: the shard with the best score wins. A shard that starts within a group has other
noise, and the parts of that group count as two groups.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from vcli.runtime.layers.kernels.launch import ceil_div, pdl_options, wait_for_previous

GROUP = tl.constexpr(16)
#: Groups that share one call of Philox: 32 apart, so that each thread of a warp has whole calls.
WORDS = tl.constexpr(4)
LANES = tl.constexpr(32)
#: Tokens whose noise comes from 32 calls. Aligned in the whole vocabulary.
TILE = 2048
#: A multiple of TILE: 64 tokens for each thread.
BLOCK = 2048
NUM_WARPS = 1
#: Programs that an H200 holds at once.
NUM_PROGRAMS = 2772
MAX_PARTS = 128
#: Rounds of Philox: 7 is the least that passes BigCrush.
ROUNDS = tl.constexpr(7)
#: Below, a row is as good as greedy, and its scores could overflow.
MIN_TEMPERATURE = tl.constexpr(1e-6)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: The interpreter has no approximate functions.
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
#: Larger than any column.
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _log(x):
    """The natural logarithm to 2**-22, for x from 1e-37 on; NaN of NaN."""
    return LN2 * (tl.log2(x) if IS_INTERPRETED else libdevice.fast_log2f(x))


@triton.jit
def _finite(x):
    """`x`, or 0 for an infinite one."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _gumbel(bits):
    """Noise from uint32: finite, and most exact where it is large, as the winners' is."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    exponential = tl.where(uniform < 0.015625, series, -_log(1.0 - uniform))
    return -_log(exponential)


@triton.jit
def _group_noise(seed, row, stream, call):
    """Noise of the groups of each of (L) calls, as (L, WORDS)."""
    zero = call * 0
    a, b, c, d = tl.philox(seed, call, zero + row, zero + stream, zero, ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape([call.shape[0], WORDS])
    return _gumbel(bits.to(tl.uint32, bitcast=True))


@triton.jit
def _token_noise(seed, row, token):
    """Noise of each of (L) tokens, of a stream that no group has."""
    zero = token * 0
    bits, _, _, _ = tl.philox(seed, token, zero + row, zero, zero + 1, ROUNDS)
    return _gumbel(bits.to(tl.uint32, bitcast=True))


@triton.jit
def _best_of(score, place):
    """The highest score and the lowest place that has it. NaN wins, nowhere."""
    is_number = tl.min((score <= float("inf")).to(tl.int32), axis=0) > 0
    best = tl.where(is_number, tl.max(score, axis=0), float("nan"))
    is_best = (score == best) & (score > float("-inf"))
    return best, tl.min(tl.where(is_best, place, NOWHERE), axis=0)


@triton.jit
def _load_groups(source, begin, end, BLOCK: tl.constexpr):
    """Logits (L, WORDS, 2, 8) of the groups from column `begin` on, and where each group begins.

    Halves of groups, with the lanes in front, so that a thread reads 16 bytes at once and holds
    whole groups.
    """
    lane = tl.arange(0, BLOCK // (WORDS * GROUP))
    first = begin + lane // LANES * (LANES * WORDS * GROUP) + lane % LANES * GROUP
    first = first[:, None] + (tl.arange(0, WORDS) * (LANES * GROUP))[None, :]
    within = tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :]
    column = first[:, :, None, None] + within[None, None, :, :]
    is_token = (column >= 0) & (column < end)
    return tl.load(source + column, mask=is_token, other=float("-inf")).to(tl.float32), first


@triton.jit(do_not_specialize=["vocab_start", "stream", "part_blocks"])
def _score_kernel(
    logits, temperatures, seed, part_best, part_column,
    row_stride, shift, vocab_start, stream, end, part_blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    is_random = temperature > 0.0
    inverse = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)
    seed_value = tl.load(seed)
    source = logits + row.to(tl.int64) * row_stride

    # The shard starts at number `shift` of its first tile.
    begin = part * part_blocks * BLOCK - shift
    best = tl.full([BLOCK // (WORDS * GROUP), WORDS], float("-inf"), tl.float32)
    place = tl.full([BLOCK // (WORDS * GROUP), WORDS], NOWHERE, tl.int32)
    for number in range(part_blocks):
        logit, first = _load_groups(source, begin + number * BLOCK, end, BLOCK)
        top = tl.max(tl.max(logit, axis=3), axis=2)
        if is_random:
            scale = inverse * LOG2E
            base = _finite(top) * scale
            # One multiply-add for each token. The rounding of `base` stays in the exponent and is
            # much where the product is huge: hence the bounds, those of the true sum.
            weight = tl.exp2(logit * scale - base[:, :, None, None])
            total = tl.sum(tl.sum(weight, axis=3), axis=2)
            call = (vocab_start + begin + number * BLOCK) // (WORDS * GROUP)
            call += tl.arange(0, BLOCK // (WORDS * GROUP))
            noise = _group_noise(seed_value, row, stream, call)
            score = top * inverse + _log(tl.clamp(total, 1.0, 16.0)) + noise
        else:
            total = tl.sum(tl.sum(logit * 0.03125, axis=3), axis=2)
            score = top
        # The maximum may pass over a NaN; a sum, scaled against overflow, does not.
        is_usable = (total <= float("inf")) & (top < float("inf"))
        score = tl.where(is_usable, score, float("nan"))
        place = tl.where(score > best, first, place)
        best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
    size: tl.constexpr = BLOCK // GROUP
    part_score, part_place = _best_of(best.reshape([size]), place.reshape([size]))
    tl.store(part_best + row * tl.num_programs(1) + part, part_score)
    tl.store(part_column + row * tl.num_programs(1) + part, part_place)


@triton.jit(do_not_specialize=["row_stride", "vocab_start", "end", "num_parts"])
def _reduce_kernel(
    logits, temperatures, seed, part_best, part_column, best, index,
    row_stride, vocab_start, end, num_parts,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    part_score = tl.load(part_best + row * num_parts + part, mask=inside, other=float("-inf"))
    part_place = tl.load(part_column + row * num_parts + part, mask=inside, other=NOWHERE)
    top, first = _best_of(part_score, part_place)

    column = tl.where(first == NOWHERE, 0, first) + tl.arange(0, GROUP)
    source = logits + row.to(tl.int64) * row_stride + column
    is_token = (column >= 0) & (column < end)
    score = tl.load(source, mask=is_token, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        score = (score - _finite(tl.max(score, axis=0))) / tl.maximum(temperature, MIN_TEMPERATURE)
        score += _token_noise(tl.load(seed), row, vocab_start + column)
    _, winner = _best_of(score, column)
    is_empty = (top == float("-inf")) & (end > 0)
    tl.store(best + row, tl.where(is_empty, float("nan"), top))
    tl.store(index + row, tl.where(winner == NOWHERE, 0, vocab_start + winner))


def sample_rows(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    seed: torch.Tensor,
    vocab_start: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score (N, float32) and token id (N, int32) of the winner among the tokens of this shard.

    `logits_NV` holds the tokens from `vocab_start` on; those from `vocab_size`, the size of the
    whole vocabulary, on are padding. Temperature 0 takes the largest logit, the lowest id among
    equals. Else exp(logit / temperature) is the weight, drawn with noise of `seed` (1, int64), and
    the score is that of the winner's group. Shards that start at multiples of 16 choose what the
    whole vocabulary does; others draw as exactly, with other noise.
    The score is NaN when a logit is NaN or +inf or all are -inf, and -inf when all is padding.
    """
    num_rows, num_columns = logits_NV.shape
    device = logits_NV.device
    assert logits_NV.stride(1) == 1
    end = max(min(num_columns, vocab_size - vocab_start), 0)
    shift = vocab_start % TILE
    wanted = max(NUM_PROGRAMS // max(num_rows, 1), 1)
    num_blocks = max(ceil_div(shift + end, BLOCK), 1)
    part_blocks = ceil_div(num_blocks, min(wanted, MAX_PARTS))
    num_parts = ceil_div(num_blocks, part_blocks)
    part_best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    part_column = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    best_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    index_N = torch.empty(num_rows, dtype=torch.int32, device=device)
    if not num_rows:
        return best_N, index_N
    # Of the parts of a cut group, no two may have the same noise.
    stream = vocab_start if vocab_start % GROUP.value else 0
    _score_kernel[(num_rows, num_parts)](
        logits_NV, temperature_N, seed, part_best, part_column,
        logits_NV.stride(0), shift, vocab_start, stream, end, part_blocks,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **pdl_options(),
    )  # fmt: skip
    _reduce_kernel[(num_rows,)](
        logits_NV, temperature_N, seed, part_best, part_column, best_N, index_N,
        logits_NV.stride(0), vocab_start, end, num_parts,
        PARTS=MAX_PARTS,
        num_warps=1,
        **pdl_options(),
    )  # fmt: skip
    return best_N, index_N
