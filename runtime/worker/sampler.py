"""From logits to one token for each row.

Order of operations (vLLM's V1 sampler has the same; Hugging Face's `generate` also penalises
before the temperature, but applies min-p last):

1. log-probabilities for the answer: of the raw logits, before anything below
2. tokens that would end a request short of its min_tokens are masked
3. penalties: repetition (Hugging Face: a seen token's logit is divided, or multiplied below 0),
   then frequency and presence (OpenAI: subtracted, over generated tokens)
4. greedy rows (temperature 0) take the largest logit and are done
5. temperature
6. min-p: tokens below min_p times the largest probability are masked
7. top-k
8. top-p: over what is left, renormalised
9. one draw from the distribution that is left

6-8 become one threshold for each row: tokens that tie with the last kept one are kept too.
Shapes: N rows that sample, V vocabulary, C candidates.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vcli.runtime.messages import TokenLogprobs
from vcli.runtime.worker.penalties import TokenHistory, apply_penalties, mask_ending_tokens
from vcli.runtime.worker.sampling_columns import SamplingRows
from vcli.runtime.worker.transfer import to_tensor
from vcli.topology.errors import VcliError

Array = npt.NDArray[Any]


class LogitsError(VcliError):
    """The model gave no usable numbers for a request (exit 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What was sampled, in row order; `logprobs` is None when no row asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


def sample(
    logits_NV: torch.Tensor,
    options: SamplingRows,
    history: TokenHistory,
    *,
    draws_N: torch.Tensor | None,
    names: list[str],
) -> SampledTokens:
    """One token for each row; overwrites `logits_NV` (float32).

    `draws_N` (float64, [0, 1)) decides the rows that are not greedy, in their order; None when
    all are. `names` names the rows in errors.

    Raises:
        LogitsError: a row holds NaN or +inf, or nothing but -inf.
    """
    raw_max_N, greedy_N = logits_NV.max(dim=-1)
    log_probs = _raw_log_probs(logits_NV, options)
    changed = mask_ending_tokens(logits_NV, options, history)
    changed |= apply_penalties(logits_NV, options, history)
    token_ids_N = logits_NV.argmax(dim=-1) if changed else greedy_N
    random_rows = np.flatnonzero(~options.is_greedy)
    if random_rows.size:
        assert draws_N is not None
        rows = to_tensor(random_rows, logits_NV.device)
        everything = random_rows.size == len(logits_NV)
        chosen = _sample_random(
            logits_NV if everything else logits_NV[rows], options, random_rows, draws_N
        )
        token_ids_N = chosen if everything else token_ids_N.index_copy(0, rows, chosen)
    # The first wait for the device in this step: ids and the check of the numbers together.
    _check_finite(raw_max_N, names)
    token_ids = token_ids_N.tolist()
    return SampledTokens(
        token_ids=token_ids, logprobs=_report_logprobs(log_probs, token_ids, options)
    )


def _check_finite(raw_max_N: torch.Tensor, names: list[str]) -> None:
    # The largest logit is NaN when any is, +inf when any is, -inf when all are.
    finite = torch.isfinite(raw_max_N).tolist()
    if all(finite):
        return
    wrong = [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    raise LogitsError(
        f"the model gave NaN or infinite logits for {', '.join(wrong)}",
        hint="try --dtype float32 or bfloat16; if that is no different, the weights are damaged",
    )


def _sample_random(
    logits_NV: torch.Tensor, options: SamplingRows, rows: Array, draws_N: torch.Tensor
) -> torch.Tensor:
    device = logits_NV.device
    temperature = options.temperature[rows]
    if (temperature != 1.0).any():
        # Shifted so that the largest is 0: the smallest temperature cannot make it infinite.
        shifted_NV = logits_NV - logits_NV.amax(dim=-1, keepdim=True)
        logits_NV = shifted_NV / to_tensor(temperature, device).unsqueeze(1)
    threshold_N = lowest_kept_logit(
        logits_NV,
        top_k=options.top_k[rows],
        top_p=options.top_p[rows],
        min_p=options.min_p[rows],
    )
    weights_NV = torch.softmax(logits_NV, dim=-1)
    if threshold_N is not None:
        weights_NV *= (logits_NV >= threshold_N.unsqueeze(1)).to(torch.float32)
    return _inverse_cdf(weights_NV, draws_N.to(device, non_blocking=True))


def _inverse_cdf(weights_NV: torch.Tensor, draws_N: torch.Tensor) -> torch.Tensor:
    """The first token at which the summed weight exceeds the draw's part of the whole.

    One draw for each row, whatever the vocabulary, and float64 sums: what a seed gives depends on
    the batch and the device only as far as the logits do, by their rounding. A token without weight
    adds nothing, so it is never the first.
    """
    cumulative_NV = weights_NV.to(torch.float64).cumsum(dim=-1)
    targets_N = draws_N * cumulative_NV[:, -1]
    return torch.searchsorted(cumulative_NV, targets_N.unsqueeze(1), right=True).squeeze(1)


def lowest_kept_logit(
    logits_NV: torch.Tensor, *, top_k: Array, top_p: Array, min_p: Array
) -> torch.Tensor | None:
    """The smallest logit of each row that min-p, then top-k, then top-p keep; None: all kept.

    Nothing is sorted that no row needs: top-k finds its k largest, and top-p is looked for among
    those; only rows with top-p and no top-k are sorted whole.
    """
    device, vocab_size = logits_NV.device, logits_NV.shape[1]
    threshold_N: torch.Tensor | None = None
    if (min_p > 0.0).any():
        # log(0) is -inf: a row without min-p keeps everything.
        with np.errstate(divide="ignore"):
            slack = np.log(min_p)
        threshold_N = logits_NV.amax(dim=-1) + to_tensor(slack, device)
    limited = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    has_nucleus = top_p < 1.0
    by_rank_only = np.flatnonzero((limited < vocab_size) & ~has_nucleus)
    small_nucleus = np.flatnonzero((limited < vocab_size) & has_nucleus)
    whole_nucleus = np.flatnonzero((limited == vocab_size) & has_nucleus)
    if not (by_rank_only.size or small_nucleus.size or whole_nucleus.size):
        return threshold_N
    if threshold_N is None:
        threshold_N = logits_NV.new_full((len(logits_NV),), -torch.inf)
    for rows, is_nucleus in ((by_rank_only, False), (small_nucleus, True)):
        if rows.size:
            _raise_threshold(threshold_N, logits_NV, rows, limited, top_p, has_nucleus=is_nucleus)
    if whole_nucleus.size:
        _raise_threshold_whole(threshold_N, logits_NV, whole_nucleus, top_p)
    return threshold_N


def _raise_threshold(
    threshold_N: torch.Tensor,
    logits_NV: torch.Tensor,
    rows: Array,
    limited: Array,
    top_p: Array,
    *,
    has_nucleus: bool,
) -> None:
    """Top-k, then with `has_nucleus` top-p, for `rows`."""
    device = logits_NV.device
    index = to_tensor(rows, device)
    counts = limited[rows]
    values_NC = logits_NV[index].topk(int(counts.max()), dim=-1).values
    ranks_C = torch.arange(values_NC.shape[1], device=device)
    counts_N1 = to_tensor(counts.astype(np.int64), device).unsqueeze(1)
    lowest_N = torch.maximum(values_NC.gather(1, counts_N1 - 1).squeeze(1), threshold_N[index])
    if has_nucleus:
        # Ties with the k-th are kept by the threshold, but do not count for the nucleus.
        kept = (values_NC >= lowest_N.unsqueeze(1)) & (ranks_C < counts_N1)
        probs_NC = torch.softmax(values_NC.masked_fill(~kept, -torch.inf), dim=-1)
        lowest_N = _nucleus_edge(values_NC, probs_NC, top_p[rows])
    threshold_N.index_copy_(0, index, lowest_N)


def _raise_threshold_whole(
    threshold_N: torch.Tensor, logits_NV: torch.Tensor, rows: Array, top_p: Array
) -> None:
    """Top-p over all tokens that min-p left, for `rows`."""
    index = to_tensor(rows, logits_NV.device)
    sorted_NV = _sorted_descending(logits_NV[index])
    kept_NV = (sorted_NV >= threshold_N[index].unsqueeze(1)).to(torch.float32)
    weights_NV = sorted_NV.softmax(dim=-1) * kept_NV
    probs_NV = weights_NV / weights_NV.sum(dim=-1, keepdim=True)
    threshold_N.index_copy_(0, index, _nucleus_edge(sorted_NV, probs_NV, top_p[rows]))


def _sorted_descending(values_NV: torch.Tensor) -> torch.Tensor:
    if values_NV.device.type == "cpu":
        # numpy sorts with vector instructions: about 20 times faster than torch 2.13 on a CPU.
        return torch.from_numpy(np.sort(values_NV.numpy(), axis=-1)).flip(-1)
    return values_NV.sort(dim=-1, descending=True).values


def _nucleus_edge(values_NC: torch.Tensor, probs_NC: torch.Tensor, top_p: Array) -> torch.Tensor:
    """The last of the descending `values_NC` before which less than `top_p` has been summed.

    Never a value whose probability is 0: what was masked before stays masked.
    """
    before_NC = probs_NC.cumsum(dim=-1) - probs_NC
    inside_NC = (before_NC < to_tensor(top_p, values_NC.device).unsqueeze(1)) & (probs_NC > 0)
    last_N1 = inside_NC.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return values_NC.gather(1, last_N1).squeeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RawLogProbs:
    rows: Array
    log_probs_NV: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor


def _raw_log_probs(logits_NV: torch.Tensor, options: SamplingRows) -> _RawLogProbs | None:
    rows = np.flatnonzero(options.num_logprobs >= 0)
    if not rows.size:
        return None
    log_probs_NV = logits_NV[to_tensor(rows, logits_NV.device)].log_softmax(dim=-1)
    count = min(int(options.num_logprobs[rows].max()), logits_NV.shape[1])
    top = log_probs_NV.topk(count, dim=-1)
    return _RawLogProbs(
        rows=rows, log_probs_NV=log_probs_NV, top_values=top.values, top_ids=top.indices
    )


def _report_logprobs(
    raw: _RawLogProbs | None, token_ids: list[int], options: SamplingRows
) -> list[TokenLogprobs | None] | None:
    if raw is None:
        return None
    sampled = [token_ids[row] for row in raw.rows]
    index = torch.tensor(sampled, device=raw.log_probs_NV.device).unsqueeze(1)
    own = raw.log_probs_NV.gather(1, index).squeeze(1).tolist()
    top_values, top_ids = raw.top_values.tolist(), raw.top_ids.tolist()
    reports: list[TokenLogprobs | None] = [None] * len(token_ids)
    for place, row in enumerate(raw.rows):
        count = int(options.num_logprobs[row])
        reports[int(row)] = TokenLogprobs(
            token_id=sampled[place],
            logprob=own[place],
            top_token_ids=top_ids[place][:count],
            top_logprobs=top_values[place][:count],
        )
    return reports
