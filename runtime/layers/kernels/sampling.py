# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""One token for each row of logits: the largest, or one drawn by the Gumbel-max trick.

A token's noise depends on the seed, the row's position and the token's id alone, so the shards of
a vocabulary choose what the whole would: the shard with the best score wins.
"""

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.launch import pdl_options, wait_for_previous

BLOCK = 1024
NUM_WARPS = 4
#: Programs that fill a GPU for one row or for many.
NUM_PROGRAMS = 1056
MAX_PARTS = 128
#: Rounds of Philox: 7 is the least that passes BigCrush.
ROUNDS = 7
#: Below, a row is as good as greedy, and its scores could overflow.
MIN_TEMPERATURE = 1e-6
#: Larger than any token id.
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _exponential(bits):
    """Exponential variates from uint32: finite, and exact near 0, where the winners are."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    return tl.where(uniform < 1e-3, series, -tl.log(1.0 - uniform))


@triton.jit
def _gumbel(seed, row, token_quarter, ROUNDS: tl.constexpr):
    """Noise of the four tokens of each quarter, as (quarters * 4)."""
    zero = token_quarter * 0
    a, b, c, d = tl.philox(seed, token_quarter, zero + row, zero, zero, ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape([token_quarter.shape[0] * 4])
    return -tl.log(_exponential(bits.to(tl.uint32, bitcast=True)))


@triton.jit
def _best_of(score, token):
    """The highest score and the lowest token that has it; NaN wins."""
    best = tl.max(score, axis=0)
    index = tl.min(tl.where(score == best, token, NO_TOKEN), axis=0)
    return best, index


@triton.jit(do_not_specialize=["vocab_start", "part_blocks"])
def _score_kernel(
    logits, temperatures, seed, part_best, part_index, part_state,
    row_stride, shift, vocab_start, end, part_blocks,
    MIN_TEMPERATURE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    is_random = temperature > 0.0
    inverse = tl.where(is_random, 1.0 / tl.maximum(temperature, MIN_TEMPERATURE), 1.0)
    seed_value = tl.load(seed)
    source = logits + row.to(tl.int64) * row_stride

    # Noise comes for four token ids at once; the shard starts at number `shift` of its first four.
    begin = part * part_blocks * BLOCK - shift
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.full([BLOCK], NO_TOKEN, tl.int32)
    # 0: no token seen; 1: only -inf; 2: a finite logit; 3 and above: NaN or +inf.
    state = tl.zeros([BLOCK], tl.int32)
    for number in range(part_blocks):
        column = begin + number * BLOCK + tl.arange(0, BLOCK)
        is_token = (column >= 0) & (column < end)
        logit = tl.load(source + column, mask=is_token, other=0.0).to(tl.float32)
        is_unusable = (logit < float("inf")) == 0  # true of NaN, too
        kind = tl.where(is_unusable, 3, tl.where(logit == float("-inf"), 1, 2))
        state = tl.maximum(state, tl.where(is_token, kind, 0))
        score = logit * inverse
        if is_random:
            first = vocab_start + begin + number * BLOCK
            quarter = first // 4 + tl.arange(0, BLOCK // 4)
            score = score + _gumbel(seed_value, row, quarter, ROUNDS)
        is_better = is_token & (score > best)
        best = tl.where(is_better, score, best)
        index = tl.where(is_better, vocab_start + column, index)
    part_score, part_token = _best_of(best, index)
    place = row * tl.num_programs(1) + part
    tl.store(part_best + place, part_score)
    tl.store(part_index + place, part_token)
    tl.store(part_state + place, tl.max(state, axis=0))


@triton.jit(do_not_specialize=["num_parts"])
def _reduce_kernel(
    part_best,
    part_index,
    part_state,
    best,
    index,
    num_parts,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    place = row * num_parts + part
    score = tl.load(part_best + place, mask=inside, other=float("-inf"))
    token = tl.load(part_index + place, mask=inside, other=NO_TOKEN)
    state = tl.max(tl.load(part_state + place, mask=inside, other=0), axis=0)
    top, winner = _best_of(score, token)
    is_unusable = (state == 1) | (state >= 3)
    tl.store(best + row, tl.where(is_unusable, float("nan"), top))
    tl.store(index + row, tl.where(winner == NO_TOKEN, 0, winner))


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
    equals. Else exp(logit / temperature) is the weight, drawn with noise of `seed` (1, int64).
    The score is NaN when a logit is NaN or +inf or all are -inf, and -inf when all is padding.
    """
    num_rows, num_columns = logits_NV.shape
    device = logits_NV.device
    assert logits_NV.stride(1) == 1
    wanted = max(NUM_PROGRAMS // max(num_rows, 1), 1)
    # Three more tokens: the first quarter may begin before the shard.
    num_blocks = triton.cdiv(num_columns + 3, BLOCK)
    part_blocks = triton.cdiv(num_blocks, min(wanted, MAX_PARTS))
    num_parts = triton.cdiv(num_blocks, part_blocks)
    part_best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    part_index, part_state = torch.empty(2, num_rows, num_parts, dtype=torch.int32, device=device)
    best_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    index_N = torch.empty(num_rows, dtype=torch.int32, device=device)
    if not num_rows:
        return best_N, index_N
    _score_kernel[(num_rows, num_parts)](
        logits_NV, temperature_N, seed, part_best, part_index, part_state,
        logits_NV.stride(0), vocab_start % 4, vocab_start,
        max(min(num_columns, vocab_size - vocab_start), 0), part_blocks,
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        ROUNDS=ROUNDS,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **pdl_options(),
    )  # fmt: skip
    _reduce_kernel[(num_rows,)](
        part_best, part_index, part_state, best_N, index_N, num_parts,
        PARTS=MAX_PARTS,
        num_warps=1,
        **pdl_options(),
    )  # fmt: skip
    return best_N, index_N
