"""The sampler: exact masks and what a draw gives, against transformers' processors."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.sampling_rows import VOCAB, history_of, random_logits, rows_of
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker import sampler as sampler_module
from vcli.runtime.worker.sampler import LogitsError, lowest_kept_logit, sample
from vcli.topology.errors import ExitStatus


def sample_rows(logits, *params, draws=None, history=None, eos=()):
    draws = None if draws is None else torch.tensor(draws, dtype=torch.float64)
    return sample(
        logits.clone(),
        rows_of(*params, eos=eos),
        history or history_of(*[([1], [])] * len(params)),
        draws_N=draws,
        names=[f"request {row}" for row in range(len(params))],
    )


def kept_tokens(logits, *params):
    """What lowest_kept_logit leaves, as a mask."""
    options = rows_of(*params)
    threshold = lowest_kept_logit(
        logits, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
    )
    if threshold is None:
        return torch.ones_like(logits, dtype=torch.bool)
    return logits >= threshold.unsqueeze(1)


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_takes_the_largest_logit_of_each_row():
    logits = random_logits(6)
    assert sample_rows(logits, *[GREEDY] * 6).token_ids == logits.argmax(-1).tolist()


def test_all_greedy_rows_sort_nothing(monkeypatch):
    def fail(*_args, **_kwargs):
        raise AssertionError("sorted for a greedy batch")

    monkeypatch.setattr(sampler_module, "lowest_kept_logit", fail)
    monkeypatch.setattr(torch.Tensor, "topk", fail)
    monkeypatch.setattr(torch.Tensor, "sort", fail)
    assert len(sample_rows(random_logits(2), GREEDY, GREEDY).token_ids) == 2


def test_rows_without_limits_need_no_threshold():
    options = rows_of(SamplingParams(), SamplingParams(temperature=0.5))
    assert (
        lowest_kept_logit(
            random_logits(2), top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
        )
        is None
    )


@pytest.mark.parametrize("top_k", [1, 2, 50, VOCAB - 1, VOCAB, VOCAB + 5])
def test_top_k_keeps_what_transformers_keeps(top_k):
    logits = random_logits(3)
    expected = TopKLogitsWarper(top_k)(None, logits) > -math.inf
    kept = kept_tokens(logits, *[SamplingParams(top_k=top_k)] * 3)
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(top_p, spread):
    logits = random_logits(4, seed=7, spread=spread)
    expected = TopPLogitsWarper(top_p)(None, logits) > -math.inf
    kept = kept_tokens(logits, *[SamplingParams(top_p=top_p)] * 4)
    assert torch.equal(kept, expected)


def test_nucleus_of_almost_all_tokens_is_found_beside_one_of_a_single_token():
    # Almost flat: 90 % of the mass needs 90 % of 4,000 tokens, next to a row that needs only one.
    logits = random_logits(2, spread=0.01, vocab=4000)
    logits[1, 17] = 50.0
    expected = TopPLogitsWarper(0.9)(None, logits) > -math.inf
    assert expected[0].sum() > 3000
    assert torch.equal(kept_tokens(logits, *[SamplingParams(top_p=0.9)] * 2), expected)


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p):
    logits = random_logits(4, seed=3)
    expected = MinPLogitsWarper(min_p)(None, logits) > -math.inf
    assert torch.equal(kept_tokens(logits, *[SamplingParams(min_p=min_p)] * 4), expected)


def test_rows_with_different_limits_do_not_touch_each_other():
    params = [
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=20, top_p=0.8),
        SamplingParams(top_k=20, top_p=0.8, min_p=0.05),
        SamplingParams(top_k=3, top_p=0.999),
        SamplingParams(top_p=0.9, min_p=0.02),
    ]
    logits = random_logits(len(params), seed=11, spread=2.0)
    kept = kept_tokens(logits, *params)
    for row, sampling in enumerate(params):
        scores = logits[row : row + 1]
        # The order of the sampler's docstring.
        if sampling.min_p:
            scores = MinPLogitsWarper(sampling.min_p)(None, scores)
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
        assert torch.equal(kept[row], scores[0] > -math.inf), row


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert kept_tokens(logits, SamplingParams(top_k=2)).tolist() == [
        [False, True, True, True, False]
    ]


def test_tokens_that_tie_with_the_kth_do_not_widen_the_nucleus():
    # Of the two largest the first has 73 %; of all that tie with the second, only 47 %. The other
    # row makes the candidates more than two.
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    params = [SamplingParams(top_k=2, top_p=0.7), SamplingParams(top_k=4, top_p=0.99)]
    assert kept_tokens(logits, *params)[0].tolist() == [True, False, False, False, False]


def test_draw_walks_the_kept_tokens_in_order_of_their_ids():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]]))
    params = SamplingParams()
    for draw, token_id in [(0.0, 0), (0.09, 0), (0.11, 1), (0.49, 1), (0.51, 3), (0.81, 4)]:
        assert sample_rows(logits, params, draws=[draw]).token_ids == [token_id]


@pytest.mark.parametrize("draw", [0.0, 0.3, 1.0 - 2.0**-52])
def test_no_draw_gives_a_masked_token(draw):
    logits = random_logits(1, vocab=60_000)
    logits[0, 0] = logits[0, -1] = 0.0
    kept = TopKLogitsWarper(3)(None, logits)[0] > -math.inf
    assert not kept[0]
    assert not kept[-1]
    token_id = sample_rows(logits, SamplingParams(top_k=3), draws=[draw]).token_ids[0]
    assert kept[token_id]


def test_temperature_scales_as_transformers_does():
    logits = random_logits(1)
    scores = TemperatureLogitsWarper(0.5)(None, logits)
    cumulative = torch.softmax(scores, -1).double().cumsum(-1)[0]
    for draw in (0.05, 0.3, 0.77, 0.95):
        expected = int((cumulative <= draw * cumulative[-1]).sum())
        assert sample_rows(logits, SamplingParams(temperature=0.5), draws=[draw]).token_ids == [
            expected
        ]


@pytest.mark.parametrize("temperature", [1e-44, 1e-30, 1e-6])
def test_smallest_temperatures_are_greedy_instead_of_nan(temperature):
    logits = random_logits(2)
    tokens = sample_rows(logits, *[SamplingParams(temperature=temperature)] * 2, draws=[0.9, 0.1])
    assert tokens.token_ids == logits.argmax(-1).tolist()


def test_greedy_and_random_rows_of_a_batch_get_what_they_get_alone():
    params = [GREEDY, SamplingParams(), GREEDY, SamplingParams(temperature=2.0, top_k=30)]
    logits = random_logits(4)
    together = sample_rows(logits, *params, draws=[0.4, 0.6]).token_ids
    draws = [None, [0.4], None, [0.6]]
    alone = [
        sample_rows(logits[row : row + 1], params[row], draws=draws[row]).token_ids[0]
        for row in range(4)
    ]
    assert together == alone


def test_greedy_row_takes_the_best_token_that_does_not_end_it():
    logits = torch.tensor([[0.0, 5.0, 4.0]])
    sampling = SamplingParams(temperature=0.0, min_tokens=1)
    assert sample_rows(logits, sampling, eos=(1,)).token_ids == [2]


def test_logprobs_are_of_the_raw_logits_whatever_the_sampling_does():
    logits = random_logits(3)
    params = [
        SamplingParams(temperature=0.3, top_k=2, repetition_penalty=1.5, logprobs=3),
        GREEDY,
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    result = sample_rows(logits, *params, draws=[0.9])
    log_probs = logits.log_softmax(-1)
    first, second, third = result.logprobs
    assert second is None
    top = log_probs[0].topk(3)
    assert first.top_token_ids == top.indices.tolist()
    assert first.top_logprobs == pytest.approx(top.values.tolist())
    assert first.token_id == result.token_ids[0]
    assert first.logprob == pytest.approx(log_probs[0, first.token_id].item())
    assert (third.token_id, third.top_token_ids) == (result.token_ids[2], [])
    assert third.logprob == pytest.approx(log_probs[2].max().item())


def test_nobody_asking_gives_no_logprobs():
    assert sample_rows(random_logits(1), GREEDY).logprobs is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(top_p=0.9)])
def test_nan_or_infinity_is_an_error_that_names_its_request_only(wrong, sampling):
    logits = random_logits(3)
    logits[1, 500] = wrong
    with pytest.raises(LogitsError) as caught:
        sample_rows(logits, *[sampling] * 3, draws=[0.5] * 3)
    assert "request 1" in caught.value.message
    assert "request 0" not in caught.value.message
    assert caught.value.exit_status is ExitStatus.BUG


def test_row_of_nothing_but_minus_infinity_is_an_error():
    with pytest.raises(LogitsError):
        sample_rows(torch.full((1, 8), -math.inf), GREEDY)


def test_sampled_shares_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = probabilities.log().repeat(4000, 1)
    draws = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    result = sample_rows(logits, *[SamplingParams()] * 4000, draws=draws.tolist())
    shares = np.bincount(result.token_ids, minlength=4) / 4000
    assert shares.tolist() == pytest.approx(probabilities.tolist(), abs=1e-3)
