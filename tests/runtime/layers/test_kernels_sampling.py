"""The Triton kernel that samples, against plain torch; see `tests.support.kernel_cases`."""

import itertools

import pytest
import torch

from tests.support.kernel_cases import (
    DEVICE,
    DTYPES,
    INF,
    KERNEL_MARKS,
    NAN,
    ints,
    randn,
)
from vcli.runtime.layers.kernels import sample_rows, sampling

pytestmark = KERNEL_MARKS


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
