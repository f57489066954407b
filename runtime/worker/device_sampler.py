"""Sampling that stays on the device: greedy, or by temperature alone.

Every rank of a TP group looks at its own part of the vocabulary, and all of them pick the winner
from the same numbers: they agree without anybody handing out tokens.
"""

import torch

from vcli.runtime.distributed.collectives import all_gather
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.layers.embedding import ParallelLMHead
from vcli.runtime.worker.step_ops import StepOps

#: Odd, so that steps and seeds do not meet.
_SEED_STRIDE = 0x9E3779B1


class DeviceSampler:
    """Draws with a seed that grows by one with each step, on every rank of `group` alike."""

    def __init__(
        self, head: ParallelLMHead, group: GroupHandle, ops: StepOps, *, seed: int
    ) -> None:
        self._group = group
        self._ops = ops
        self._start = head.rows.start
        self._vocab_size = head.rows.total
        self._seed = torch.full(
            (1,), (seed * _SEED_STRIDE) % 2**31, dtype=torch.int64, device=head.weight.device
        )

    def sample(
        self, local_logits_NV: torch.Tensor, temperature_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (N,) int64, and the best numbers (N,) float32: NaN where a row had no logits.

        A collective of the group. `local_logits_NV` is this rank's part, padding included.
        """
        self._seed += 1
        best_N, index_N = self._ops.sample_rows(
            local_logits_NV, temperature_N, self._seed, self._start, self._vocab_size
        )
        if self._group.size == 1:
            return index_N.long(), best_N
        # A float32 holds every token id below 2**24.
        pair_N2 = torch.stack((best_N, index_N.float()), dim=-1)
        pairs_PN2 = all_gather(pair_N2.unsqueeze(0), self._group, dim=0)
        best_PN, index_PN = pairs_PN2.unbind(-1)
        best_N, rank_N = best_PN.max(dim=0)
        return index_PN.gather(0, rank_N.unsqueeze(0)).squeeze(0).long(), best_N
