"""The decoder that all supported families share; `ModelSpec` says where they differ.

Llama: no norm of queries and keys. Qwen2: biases on query, key and value. Qwen3: norms of queries
and keys. Qwen3-MoE: as Qwen3, with experts in place of the MLP.

Shapes: T tokens of the batch, N rows, D hidden, H query heads here, K kv heads here, E head size,
V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.layers.activation import silu_and_mul
from vcli.runtime.layers.attention import (
    Attention,
    AttentionBackend,
    AttentionStep,
    ForwardMetadata,
)
from vcli.runtime.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vcli.runtime.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    OutputPart,
    QKVParallelLinear,
    RowParallelLinear,
    can_pack,
)
from vcli.runtime.layers.moe import SparseMoe
from vcli.runtime.layers.norm import RMSNorm
from vcli.runtime.layers.rotary import RotaryEmbedding, rotate
from vcli.runtime.layers.share import even_share, head_shares
from vcli.runtime.layers.weights import WeightSlice
from vcli.topology.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How the tensors of a model part are made: over which TP group, of which dtype, where."""

    group: GroupHandle
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """What all layers of one step share."""

    attention: AttentionStep
    cos: torch.Tensor
    sin: torch.Tensor


class DecoderAttention(nn.Module):
    """Projections, optional norms of queries and keys, rotation, attention."""

    def __init__(self, spec: ModelSpec, layer_index: int, place: Placement) -> None:
        super().__init__()
        self.head_size = spec.head_size
        heads = head_shares(spec, place.group)
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            heads=heads,
            head_size=spec.head_size,
            has_bias=spec.has_qkv_bias,
            dtype=place.dtype,
            device=place.device,
        )
        self.o_proj = RowParallelLinear(
            heads.query.times(spec.head_size),
            spec.hidden_size,
            group=place.group,
            has_bias=spec.has_output_bias,
            dtype=place.dtype,
            device=place.device,
        )
        self.q_norm = _norm(spec, place, spec.head_size) if spec.has_qk_norm else None
        self.k_norm = _norm(spec, place, spec.head_size) if spec.has_qk_norm else None
        self.attention = Attention(
            layer_index,
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            spec.head_size,
            spec.head_size**-0.5,
        )

    def forward(self, x_TD: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """(T, D) on every rank."""
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        heads_TNE = self.qkv_proj(x_TD).view(-1, num_heads + 2 * num_kv_heads, self.head_size)
        num_rotated = num_heads + num_kv_heads
        rotated, value_TKE = heads_TNE[:, :num_rotated], heads_TNE[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
            rotated = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        rotated = rotate(rotated, step.cos, step.sin)
        query_THE, key_TKE = rotated[:, :num_heads], rotated[:, num_heads:]
        output_THE = self.attention(query_THE, key_TKE, value_TKE, step.attention)
        output: torch.Tensor = self.o_proj(output_THE.flatten(1))
        return output

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
        )
        self.down_proj = RowParallelLinear(
            share,
            spec.hidden_size,
            group=place.group,
            has_bias=spec.has_mlp_bias,
            dtype=place.dtype,
            device=place.device,
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """(T, D) on every rank."""
        output: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x_TD)))
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
        self.input_layernorm = _norm(spec, place, spec.hidden_size)
        self.post_attention_layernorm = _norm(spec, place, spec.hidden_size)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of the MLP, not yet added, and the residual it belongs to."""
        x_TD, residual_TD = self.input_layernorm.add_and_norm(x_TD, residual_TD)
        x_TD = self.self_attn(x_TD, step)
        x_TD, residual_TD = self.post_attention_layernorm.add_and_norm(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        yield from self.self_attn.weight_slices(f"{prefix}.self_attn")
        yield from self.mlp.weight_slices(f"{prefix}.mlp")
        yield from self.input_layernorm.weight_slices(f"{prefix}.input_layernorm")
        yield from self.post_attention_layernorm.weight_slices(f"{prefix}.post_attention_layernorm")


class CausalLM(nn.Module):
    """One pipeline stage of a model: some decoder layers, first with embedding, last with head."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ParallelContext,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layer_span: tuple[int, int],
        attention_backend: AttentionBackend,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.context = context
        self.dtype = dtype
        self.device = device
        self.layer_span = layer_span
        self.attention_backend = attention_backend
        place = Placement(group=context.tp, dtype=dtype, device=device)
        rows = even_share(spec.vocab_size, context.tp, "vocab_size", padded=spec.cut.vocab_size)
        vocabulary = (rows, spec.hidden_size)
        self.embed_tokens = (
            VocabParallelEmbedding(*vocabulary, group=context.tp, dtype=dtype, device=device)
            if context.pp.is_first
            else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer_index, place) for layer_index in range(*layer_span)
        )
        self.rotary = RotaryEmbedding(
            spec.rope,
            head_size=spec.head_size,
            max_position_embeddings=spec.max_position_embeddings,
            device=device,
        )
        self.norm = _norm(spec, place, spec.hidden_size) if context.pp.is_last else None
        self.lm_head: ParallelLMHead | None = None
        if context.pp.is_last:
            tied = self.embed_tokens if spec.tie_word_embeddings else None
            self.lm_head = ParallelLMHead(
                *vocabulary, group=context.tp, dtype=dtype, device=device, tied_to=tied
            )

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        metadata: ForwardMetadata,
        intermediate: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Hidden states (T, D) from the last stage; what the next stage needs from the others.

        `intermediate` is what the previous stage gave; the first stage has none.
        """
        residual_TD: torch.Tensor | None
        if self.embed_tokens is not None:
            x_TD, residual_TD = self.embed_tokens(input_ids_T), None
        else:
            assert intermediate is not None, (
                "a later pipeline stage needs the previous one's output"
            )
            x_TD, residual_TD = intermediate["hidden"], intermediate["residual"]
        cos, sin = self.rotary.cos_sin(positions_T, self.dtype)
        attention = AttentionStep(
            backend=self.attention_backend,
            plan=self.attention_backend.plan(metadata),
            slot_mapping=metadata.slot_mapping,
        )
        step = LayerStep(attention=attention, cos=cos, sin=sin)
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, step)
        if self.norm is None:
            assert residual_TD is not None, "a pipeline stage has at least one layer"
            return {"hidden": x_TD, "residual": residual_TD}
        normed_TD, _ = self.norm.add_and_norm(x_TD, residual_TD)
        return normed_TD

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits (N, V), float32, on every TP rank of the last stage."""
        assert self.lm_head is not None, "only the last pipeline stage has the head"
        return self.lm_head.compute_logits(hidden_ND)

    def empty_intermediate(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Buffers for what the previous stage sends for `num_tokens`."""
        shape = (num_tokens, self.spec.hidden_size)
        return {
            name: torch.empty(shape, dtype=self.dtype, device=self.device)
            for name in ("hidden", "residual")
        }

    def weight_map(self) -> list[WeightSlice]:
        """Everything that this rank takes from a checkpoint."""
        slices: list[WeightSlice] = []
        if self.embed_tokens is not None:
            slices.extend(self.embed_tokens.weight_slices("model.embed_tokens.weight"))
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            slices.extend(layer.weight_slices(f"model.layers.{layer.layer_index}"))
        if self.norm is not None:
            slices.extend(self.norm.weight_slices("model.norm"))
        if self.lm_head is not None and not self.lm_head.is_tied:
            # A tied head on a stage without the embedding has its own copy of it.
            tied = self.spec.tie_word_embeddings
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            slices.extend(self.lm_head.weight_slices(name))
        return slices

    def finish_loading(self) -> None:
        """Call once when all weights are in: brings them into the form that multiplies fastest."""
        if not can_pack(self.dtype, self.device):
            return
        for module in self.modules():
            if isinstance(module, LinearBase | ParallelLMHead):
                module.pack()


def _norm(spec: ModelSpec, place: Placement, size: int) -> RMSNorm:
    return RMSNorm(size, spec.rms_norm_eps, dtype=place.dtype, device=place.device)


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
