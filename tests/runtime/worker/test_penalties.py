"""Penalties and masked ends, against loops and transformers' processor."""

import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from tests.support.sampling_rows import VOCAB, history_of, random_logits, rows_of
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.penalties import apply_penalties, mask_ending_tokens

GREEDY = SamplingParams(temperature=0.0)


def test_repetition_penalty_equals_transformers_over_prompt_and_output():
    logits = random_logits(2)
    history = history_of(([5, 6, 5, 7], [8, 8]), ([1, 2], []))
    options = rows_of(
        SamplingParams(repetition_penalty=1.7), SamplingParams(repetition_penalty=0.6)
    )
    actual = logits.clone()
    assert apply_penalties(actual, options, history)
    for row, tokens, penalty in ((0, [5, 6, 5, 7, 8, 8], 1.7), (1, [1, 2], 0.6)):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([tokens]), logits[row : row + 1].clone()
        )
        torch.testing.assert_close(actual[row : row + 1], expected)


def test_presence_and_frequency_count_generated_tokens_only():
    logits = random_logits(1)
    history = history_of(([5, 6, 5], [5, 9, 9, 9]))
    options = rows_of(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25))
    expected = logits.clone()
    for token_id, count in ((5, 1), (9, 3)):
        expected[0, token_id] -= 0.5 - 0.25 * count
    actual = logits.clone()
    apply_penalties(actual, options, history)
    torch.testing.assert_close(actual, expected)


def test_penalties_leave_other_rows_bitwise_alone():
    logits = random_logits(3)
    history = history_of(*[([1, 2], [3])] * 3)
    actual = logits.clone()
    options = rows_of(GREEDY, SamplingParams(repetition_penalty=2.0), GREEDY)
    apply_penalties(actual, options, history)
    assert torch.equal(actual[[0, 2]], logits[[0, 2]])
    assert not torch.equal(actual[1], logits[1])


def test_no_penalty_changes_nothing_and_says_so():
    logits = random_logits(1)
    actual = logits.clone()
    assert not apply_penalties(actual, rows_of(GREEDY), history_of(([1], [2])))
    assert torch.equal(actual, logits)


def test_padding_of_a_shorter_row_is_not_taken_for_token_zero():
    logits = random_logits(2)
    actual = logits.clone()
    both = [SamplingParams(repetition_penalty=2.0)] * 2
    apply_penalties(actual, rows_of(*both), history_of(([5], []), ([5, 6, 7], [8])))
    assert actual[0, 0] == logits[0, 0]


def test_ending_tokens_are_masked_until_min_tokens():
    sampling = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3, VOCAB + 7))
    for generated, masked in (([], True), ([9], True), ([9, 9], False)):
        logits = random_logits(1)
        mask_ending_tokens(logits, rows_of(sampling, eos=(4,)), history_of(([1], generated)))
        assert torch.isneginf(logits[0, [3, 4]]).tolist() == [masked, masked]
        assert int(torch.isneginf(logits).sum()) == (2 if masked else 0)


def test_ignore_eos_masks_only_stop_tokens():
    sampling = SamplingParams(min_tokens=2, stop_token_ids=(3,), ignore_eos=True)
    logits = random_logits(1)
    mask_ending_tokens(logits, rows_of(sampling, eos=(4,)), history_of(([1], [])))
    assert torch.isneginf(logits[0, [3, 4]]).tolist() == [True, False]
