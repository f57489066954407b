"""What happens on the device before and after the model in a step: in torch, or as one kernel each.

Shapes: R requests, N rows that sample, V vocabulary of this rank.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

#: Randomness of a step, for all ranks the same.
_SEED_PRIME = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The tensors (R,) that a step of decodes reads; a padding row has length 0 and slot -1."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def empty(cls, num_requests: int, device: torch.device) -> "DecodeInputs":
        """Zeros for `num_requests`."""

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_requests, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(torch.int64),
            positions=zeros(torch.int64),
            slot_mapping=zeros(torch.int64),
            rows=zeros(torch.int32),
            seq_lens=zeros(torch.int32),
        )


class StepOps(Protocol):
    """The operations of a step around the model."""

    def prepare_decode(
        self,
        packed: torch.Tensor,
        block_tables: torch.Tensor,
        last_token: torch.Tensor,
        block_size: int,
        out: DecodeInputs,
    ) -> None:
        """Enter the new blocks of `packed` (5, R) into `block_tables`, and fill `out`."""

    def sample_rows(
        self,
        logits_NV: torch.Tensor,
        temperature_N: torch.Tensor,
        seed: torch.Tensor,
        vocab_start: int,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best score of each row, float32, and its token id; NaN where logits are no numbers.

        Temperature 0: the largest logit. Else a draw from the softmax of logit / temperature, as
        the highest score with Gumbel noise, so that of several shards the best one's token is a
        draw from all (Gumbel-max). The columns are the tokens from
        `vocab_start` on; those from `vocab_size` on are padding.
        """


class TorchStepOps:
    """Any device; the reference."""

    def prepare_decode(
        self,
        packed: torch.Tensor,
        block_tables: torch.Tensor,
        last_token: torch.Tensor,
        block_size: int,
        out: DecodeInputs,
    ) -> None:
        """As the protocol says."""
        rows, seq_lens, token_ids, columns, block_ids = packed.long()
        has_new = columns >= 0
        block_tables[rows[has_new], columns[has_new]] = block_ids[has_new].int()
        is_real = seq_lens > 0
        positions = (seq_lens - 1).clamp(min=0)
        blocks = block_tables[rows, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        input_ids = torch.where(token_ids < 0, last_token[rows], token_ids)
        out.input_ids.copy_(torch.where(is_real, input_ids, 0))
        out.positions.copy_(positions)
        out.slot_mapping.copy_(torch.where(is_real, slots, -1))
        out.rows.copy_(rows)
        out.seq_lens.copy_(seq_lens)

    def sample_rows(
        self,
        logits_NV: torch.Tensor,
        temperature_N: torch.Tensor,
        seed: torch.Tensor,
        vocab_start: int,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the protocol says."""
        logits_NV = logits_NV[:, : max(vocab_size - vocab_start, 0)].float()
        is_random = (temperature_N > 0).unsqueeze(1)
        scaled = logits_NV / torch.where(is_random, temperature_N.unsqueeze(1), 1.0)
        generator = torch.Generator(logits_NV.device)
        generator.manual_seed(int(seed) * _SEED_PRIME + vocab_start)
        noise = torch.empty_like(scaled).exponential_(generator=generator).log().neg()
        best_N, index_N = torch.where(is_random, scaled + noise, scaled).max(dim=-1)
        raw_N = logits_NV.amax(dim=-1)
        best_N = torch.where(torch.isfinite(raw_N), best_N, torch.nan)
        return best_N, (index_N + vocab_start).int()
