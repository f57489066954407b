"""What earlier tokens of a request do to its logits. Only the rows that need it are touched.

Shapes: N rows that sample, P of them with penalties, L longest of their token rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vcli.runtime.worker.sampling_columns import SamplingRows
from vcli.runtime.worker.transfer import to_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """The known tokens of the rows that sample; `token_ids` is the batch's array, not a copy."""

    token_ids: npt.NDArray[np.int32]
    rows: npt.NDArray[np.intp]
    num_tokens: npt.NDArray[np.int32]
    num_prompt_tokens: npt.NDArray[np.int32]

    @property
    def num_generated(self) -> npt.NDArray[np.int32]:
        """Tokens generated so far, for each row."""
        return self.num_tokens - self.num_prompt_tokens


def mask_ending_tokens(
    logits_NV: torch.Tensor, options: SamplingRows, history: TokenHistory
) -> bool:
    """Mask what would end a request below its min_tokens; whether anything was masked."""
    short = np.flatnonzero(history.num_generated < options.min_tokens)
    vocab_size = logits_NV.shape[1]
    pairs = [
        (row, token_id)
        for row in short.tolist()
        for token_id in options.ending_token_ids[row]
        if 0 <= token_id < vocab_size
    ]
    if not pairs:
        return False
    index = to_tensor(np.asarray(pairs, dtype=np.int64).T.copy(), logits_NV.device)
    logits_NV[index[0], index[1]] = -torch.inf
    return True


def apply_penalties(logits_NV: torch.Tensor, options: SamplingRows, history: TokenHistory) -> bool:
    """Repetition, frequency and presence penalties in place; whether any row has one."""
    penalised = np.flatnonzero(options.has_penalties)
    if not penalised.size:
        return False
    device = logits_NV.device
    index = to_tensor(penalised, device)
    logits_PV = logits_NV[index]
    longest = int(history.num_tokens[penalised].max())
    token_ids = history.token_ids[history.rows[penalised], :longest].astype(np.int64)
    columns = np.arange(longest)
    is_known = columns < history.num_tokens[penalised, None]
    is_generated = is_known & (columns >= history.num_prompt_tokens[penalised, None])
    repetition = options.repetition_penalty[penalised]
    if (repetition != 1.0).any():
        seen_PV = _count(token_ids, is_known, logits_PV) > 0
        factor_P1 = to_tensor(repetition, device).unsqueeze(1)
        scaled_PV = torch.where(logits_PV < 0, logits_PV * factor_P1, logits_PV / factor_P1)
        logits_PV = torch.where(seen_PV, scaled_PV, logits_PV)
    frequency = options.frequency_penalty[penalised]
    presence = options.presence_penalty[penalised]
    if (frequency != 0.0).any() or (presence != 0.0).any():
        count_PV = _count(token_ids, is_generated, logits_PV)
        logits_PV = logits_PV - to_tensor(frequency, device).unsqueeze(1) * count_PV
        logits_PV = logits_PV - to_tensor(presence, device).unsqueeze(1) * (count_PV > 0)
    logits_NV.index_copy_(0, index, logits_PV)
    return True


def _count(
    token_ids: npt.NDArray[np.int64], included: npt.NDArray[np.bool_], logits_PV: torch.Tensor
) -> torch.Tensor:
    """How often each token of the vocabulary is among the `included` ones, for each row."""
    num_rows, vocab_size = logits_PV.shape
    # One bin more than tokens: it takes what is not included.
    bins_PL = to_tensor(np.where(included, token_ids, vocab_size), logits_PV.device)
    counts = logits_PV.new_zeros((num_rows, vocab_size + 1))
    counts.scatter_add_(1, bins_PL, torch.ones_like(bins_PL, dtype=counts.dtype))
    return counts[:, :vocab_size]
