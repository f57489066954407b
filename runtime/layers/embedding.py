"""Embedding and head, divided over the vocabulary.

Shapes: T tokens of the batch, N rows, D hidden, V the whole vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from vcli.runtime.distributed.collectives import all_gather, all_reduce
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.layers.linear import multiply_packed, pack_weight
from vcli.runtime.layers.ops import TORCH_OPS, LayerOps
from vcli.runtime.layers.share import Share
from vcli.runtime.layers.weights import WeightSlice, empty_weight


class VocabParallelEmbedding(nn.Module):
    """Each rank has a run of rows of the vocabulary; those at the end may be padding."""

    def __init__(
        self,
        rows: Share,
        hidden_size: int,
        *,
        group: GroupHandle,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.rows = rows
        self.hidden_size = hidden_size
        if weight is None:
            weight = empty_weight(rows.size, hidden_size, dtype=dtype, device=device)
        self.weight = weight

    def forward(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """(T, D), on every rank."""
        if self.group.size == 1:
            return F.embedding(input_ids_T, self.weight)
        rows_T = input_ids_T - self.rows.start
        is_elsewhere_T = (rows_T < 0) | (rows_T >= self.rows.count)
        embedded_TD = F.embedding(rows_T.masked_fill(is_elsewhere_T, 0), self.weight)
        embedded_TD.masked_fill_(is_elsewhere_T[:, None], 0)
        return all_reduce(embedded_TD, self.group)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """What it takes from the checkpoint tensor `name`."""
        yield WeightSlice(
            name=name,
            shape=(self.rows.total, self.hidden_size),
            source=(self.rows.source, slice(0, self.hidden_size)),
            target=self.weight,
        )


class ParallelLMHead(VocabParallelEmbedding):
    """The rows of the vocabulary as a linear layer, with those of `tied_to` where given."""

    def __init__(
        self,
        rows: Share,
        hidden_size: int,
        *,
        group: GroupHandle,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        tied_to: VocabParallelEmbedding | None = None,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        weight = None if tied_to is None else tied_to.weight
        super().__init__(rows, hidden_size, group=group, dtype=dtype, device=device, weight=weight)
        self.ops = ops
        self.is_tied = tied_to is not None
        self._packed: torch.Tensor | None = None

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits (N, V), float32, of the whole vocabulary on every rank."""
        return self.whole_logits(self.compute_local_logits(hidden_ND))

    def compute_local_logits(
        self, hidden_ND: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (N, rows of this rank), padding included, in the model's dtype.

        In `out` where one is given: on a device, where weights are never packed.
        """
        if out is not None:
            assert self._packed is None, "weights are packed on CPUs alone"
            return self.ops.linear_into(hidden_ND, self.weight, out)
        if self._packed is None:
            return self.ops.linear(hidden_ND, self.weight, None)
        return multiply_packed(hidden_ND, self._packed, None)

    def whole_logits(self, local_logits: torch.Tensor) -> torch.Tensor:
        """(N, V) float32 on every rank, from what each computed of its own rows."""
        # The padding of all ranks lies behind the last token: what isn't a token can't be sampled.
        return all_gather(local_logits, self.group, dim=-1)[:, : self.rows.total].float()

    def pack(self) -> None:
        """Multiplies by a packed copy from now on; gives up the plain weight if it is not tied."""
        self._packed = pack_weight(self.weight)
        if not self.is_tied:
            self.weight = empty_weight(0, dtype=self.weight.dtype, device=self.weight.device)
