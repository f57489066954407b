"""`StepOps` by our own Triton kernels."""

import torch

from vcli.runtime.layers import kernels
from vcli.runtime.worker.step_ops import DecodeInputs


class TritonStepOps:
    """One kernel before the model, two after it."""

    def prepare_decode(
        self,
        packed: torch.Tensor,
        block_tables: torch.Tensor,
        last_token: torch.Tensor,
        block_size: int,
        out: DecodeInputs,
    ) -> None:
        """As the protocol says."""
        kernels.prepare_decode(
            packed,
            block_tables,
            last_token,
            block_size,
            input_ids_R=out.input_ids,
            positions_R=out.positions,
            slot_mapping_R=out.slot_mapping,
            rows_R=out.rows,
            seq_lens_R=out.seq_lens,
        )

    def sample_rows(
        self,
        logits_NV: torch.Tensor,
        temperature_N: torch.Tensor,
        seed: torch.Tensor,
        vocab_start: int,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the protocol says."""
        return kernels.sample_rows(logits_NV, temperature_N, seed, vocab_start, vocab_size)
