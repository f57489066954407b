"""Mixture of experts: router, and experts whose intermediate size is divided over the TP group.

Shapes: T tokens of the batch, D hidden, X experts, P experts per token, F intermediate size here.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from vcli.runtime.distributed.collectives import all_reduce
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.layers.activation import silu_and_mul
from vcli.runtime.layers.linear import ReplicatedLinear
from vcli.runtime.layers.share import Share
from vcli.runtime.layers.weights import WeightSlice, empty_weight
from vcli.topology.model_spec import MoeSpec


class SparseMoe(nn.Module):
    """Sends each token through its experts and adds their outputs by the router's weights."""

    def __init__(
        self,
        moe: MoeSpec,
        hidden_size: int,
        *,
        columns: Share,
        group: GroupHandle,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.moe = moe
        self.group = group
        self.hidden_size = hidden_size
        self.columns = columns
        self.gate = ReplicatedLinear(hidden_size, moe.num_experts, dtype=dtype, device=device)
        self.gate_up_weight = empty_weight(
            moe.num_experts, 2 * columns.size, hidden_size, dtype=dtype, device=device
        )
        self.down_weight = empty_weight(
            moe.num_experts, hidden_size, columns.size, dtype=dtype, device=device
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """(T, D) on every rank."""
        weights_TP, experts_TP = self.route(x_TD)
        order = experts_TP.flatten().argsort(stable=True)
        tokens = order // self.moe.num_experts_per_token
        weights = weights_TP.flatten()[order]
        # Waits for the device: the loop needs to know how many tokens each expert has.
        counts = experts_TP.flatten().bincount(minlength=self.moe.num_experts).tolist()
        output_TD = torch.zeros_like(x_TD)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                chosen = tokens[start : start + count]
                expert_output = self._expert(x_TD[chosen], expert)
                weighted = expert_output * weights[start : start + count, None]
                output_TD.index_add_(0, chosen, weighted)
            start += count
        return all_reduce(output_TD, self.group)

    def route(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts (T, P) of each token; the softmax is over all experts, in float32."""
        probabilities_TX = F.softmax(self.gate(x_TD), dim=-1, dtype=torch.float32)
        weights_TP, experts_TP = probabilities_TX.topk(self.moe.num_experts_per_token, dim=-1)
        if self.moe.norm_topk_prob:
            weights_TP = weights_TP / weights_TP.sum(dim=-1, keepdim=True)
        return weights_TP.to(x_TD.dtype), experts_TP

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        hidden = silu_and_mul(F.linear(x, self.gate_up_weight[expert]))
        return F.linear(hidden, self.down_weight[expert])

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint that has each expert's tensors by themselves."""
        yield from self.gate.weight_slices(f"{prefix}.gate")
        mine, everything = self.columns.source, slice(0, self.hidden_size)
        total = self.columns.total
        for expert in range(self.moe.num_experts):
            gate, up = self.gate_up_weight[expert].chunk(2)
            for name, target in (("gate_proj", gate), ("up_proj", up)):
                yield WeightSlice(
                    name=f"{prefix}.experts.{expert}.{name}.weight",
                    shape=(total, self.hidden_size),
                    source=(mine, everything),
                    target=target,
                )
            yield WeightSlice(
                name=f"{prefix}.experts.{expert}.down_proj.weight",
                shape=(self.hidden_size, total),
                source=(everything, mine),
                target=self.down_weight[expert],
            )
