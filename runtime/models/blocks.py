"""The blocks of a decoder layer; `ModelSpec` says which of their parts a family has.

Shapes: T tokens of the batch, D hidden, H query heads here, K kv heads here, E head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from vcli.runtime.distributed.collectives import PartialSum
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.layers.attention import Attention, AttentionStep
from vcli.runtime.layers.linear import (
    MergedColumnParallelLinear,
    OutputPart,
    QKVParallelLinear,
    RowParallelLinear,
)
from vcli.runtime.layers.moe import SparseMoe
from vcli.runtime.layers.norm import RMSNorm
from vcli.runtime.layers.ops import HeadNorms, LayerOps, RopeInputs
from vcli.runtime.layers.rotary import rotate
from vcli.runtime.layers.share import even_share, head_shares
from vcli.runtime.layers.weights import WeightSlice
from vcli.topology.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a model part is made: over which TP group, of which dtype, where, computed by what."""

    group: GroupHandle
    dtype: torch.dtype
    device: torch.device
    ops: LayerOps


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """What all layers of one step share."""

    attention: AttentionStep
    rope: RopeInputs | None
    """For operations that rotate by themselves."""
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None
    """Cosines and sines of this step's positions, for the others."""
    queries_THE: torch.Tensor | None = None
    """Where each layer leaves its queries; None: in memory of their own."""


class DecoderAttention(nn.Module):
    """Projections, optional norms of queries and keys, rotation, attention."""

    def __init__(self, spec: ModelSpec, layer_index: int, place: Placement) -> None:
        super().__init__()
        self.head_size = spec.head_size
        self.ops = place.ops
        heads = head_shares(spec, place.group)
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            heads=heads,
            head_size=spec.head_size,
            has_bias=spec.has_qkv_bias,
            dtype=place.dtype,
            device=place.device,
            ops=place.ops,
        )
        self.o_proj = RowParallelLinear(
            heads.query.times(spec.head_size),
            spec.hidden_size,
            group=place.group,
            has_bias=spec.has_output_bias,
            dtype=place.dtype,
            device=place.device,
            ops=place.ops,
        )
        self.q_norm = make_norm(spec, place, spec.head_size) if spec.has_qk_norm else None
        self.k_norm = make_norm(spec, place, spec.head_size) if spec.has_qk_norm else None
        self.attention = Attention(
            layer_index,
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            spec.head_size,
            spec.head_size**-0.5,
        )

    def queries(self, x_TD: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """(T, H, E); keys and values of the step are written into the cache."""
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        heads_TNE = self.qkv_proj(x_TD).view(-1, num_heads + 2 * num_kv_heads, self.head_size)
        if step.rope is None or self.ops.rope_and_cache is None:
            return self._queries_in_parts(heads_TNE, step)
        return self.ops.rope_and_cache(
            heads_TNE,
            step.rope,
            self.head_norms,
            self.attention.kv_cache,
            num_heads,
            out=step.queries_THE,
        )

    def output(
        self, attended_THE: torch.Tensor, rows_N: torch.Tensor | None = None
    ) -> torch.Tensor | PartialSum:
        """(T, D), or (N, D) of tokens `rows_N`: this rank's part of the sum over the group."""
        attended = attended_THE.flatten(1)
        if rows_N is not None:
            attended = attended.index_select(0, rows_N)
        output: torch.Tensor | PartialSum = self.o_proj(attended)
        return output

    def _queries_in_parts(self, heads_TNE: torch.Tensor, step: LayerStep) -> torch.Tensor:
        assert step.cos_sin is not None
        num_heads = self.qkv_proj.num_heads
        num_rotated = num_heads + self.qkv_proj.num_kv_heads
        rotated, value_TKE = heads_TNE[:, :num_rotated], heads_TNE[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
            rotated = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        rotated = rotate(rotated, *step.cos_sin)
        query_THE, key_TKE = rotated[:, :num_heads], rotated[:, num_heads:]
        self.attention.write(key_TKE, value_TKE, step.attention.slot_mapping)
        return query_THE if step.queries_THE is None else step.queries_THE.copy_(query_THE)

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of query and key heads, where the family has them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(query=self.q_norm.weight, key=self.k_norm.weight, eps=self.q_norm.eps)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        yield from self.qkv_proj.weight_slices(prefix)
        yield from self.o_proj.weight_slices(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_slices(f"{prefix}.q_norm")
            yield from self.k_norm.weight_slices(f"{prefix}.k_norm")


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one linear layer."""

    def __init__(self, spec: ModelSpec, place: Placement) -> None:
        super().__init__()
        self.ops = place.ops
        share = even_share(
            spec.intermediate_size,
            place.group,
            "intermediate_size",
            padded=spec.cut.intermediate_size,
        )
        self.gate_up_proj = MergedColumnParallelLinear(
            spec.hidden_size,
            [OutputPart(name=name, rows=share) for name in ("gate_proj", "up_proj")],
            has_bias=spec.has_mlp_bias,
            dtype=place.dtype,
            device=place.device,
            ops=place.ops,
        )
        self.down_proj = RowParallelLinear(
            share,
            spec.hidden_size,
            group=place.group,
            has_bias=spec.has_mlp_bias,
            dtype=place.dtype,
            device=place.device,
            ops=place.ops,
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor | PartialSum:
        """(T, D): this rank's part of the sum over the group."""
        hidden = self.ops.silu_and_mul(self.gate_up_proj(x_TD))
        output: torch.Tensor | PartialSum = self.down_proj(hidden)
        return output

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        yield from self.gate_up_proj.weight_slices(prefix)
        yield from self.down_proj.weight_slices(f"{prefix}.down_proj")


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, spec: ModelSpec, layer_index: int, place: Placement) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.self_attn = DecoderAttention(spec, layer_index, place)
        self.mlp: GatedMlp | SparseMoe = _mlp(spec, layer_index, place)
        self.input_layernorm = make_norm(spec, place, spec.hidden_size)
        self.post_attention_layernorm = make_norm(spec, place, spec.hidden_size)

    def forward(
        self,
        x_TD: torch.Tensor | PartialSum,
        residual_TD: torch.Tensor | None,
        step: LayerStep,
        rows_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """The output of the MLP, not yet added, and the residual it belongs to.

        Those of tokens `rows_N` (int64) alone where given: keys and values are written for all,
        and of the last layer nothing else is used.
        """
        query_THE, residual_TD = self.before_attention(x_TD, residual_TD, step)
        attended_THE = self.self_attn.attention(query_THE, step.attention)
        return self.after_attention(attended_THE, residual_TD, rows_N)

    def before_attention(
        self, x_TD: torch.Tensor | PartialSum, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries (T, H, E), and the residual; keys and values are in the cache then."""
        normed_TD, residual_TD = self.input_layernorm.add_and_norm(x_TD, residual_TD)
        return self.self_attn.queries(normed_TD, step), residual_TD

    def after_attention(
        self,
        attended_THE: torch.Tensor,
        residual_TD: torch.Tensor,
        rows_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """What `forward` gives, from what attention gave."""
        x_TD = self.self_attn.output(attended_THE, rows_N)
        if rows_N is not None:
            residual_TD = residual_TD.index_select(0, rows_N)
        normed_TD, residual_TD = self.post_attention_layernorm.add_and_norm(x_TD, residual_TD)
        return self.mlp(normed_TD), residual_TD

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        yield from self.self_attn.weight_slices(f"{prefix}.self_attn")
        yield from self.mlp.weight_slices(f"{prefix}.mlp")
        yield from self.input_layernorm.weight_slices(f"{prefix}.input_layernorm")
        yield from self.post_attention_layernorm.weight_slices(f"{prefix}.post_attention_layernorm")


def make_norm(spec: ModelSpec, place: Placement, size: int) -> RMSNorm:
    """A norm over `size` numbers."""
    return RMSNorm(size, spec.rms_norm_eps, dtype=place.dtype, device=place.device, ops=place.ops)


def _mlp(spec: ModelSpec, layer_index: int, place: Placement) -> GatedMlp | SparseMoe:
    if spec.moe is not None and spec.moe.is_sparse_layer(layer_index):
        share = even_share(
            spec.moe.intermediate_size,
            place.group,
            "moe_intermediate_size",
            padded=spec.cut.moe_intermediate_size,
        )
        return SparseMoe(
            spec.moe,
            spec.hidden_size,
            columns=share,
            group=place.group,
            dtype=place.dtype,
            device=place.device,
        )
    return GatedMlp(spec, place)
