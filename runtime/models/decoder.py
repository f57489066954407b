"""The decoder that all supported families share; `ModelSpec` says where they differ.

Llama: no norm of queries and keys. Qwen2: biases on query, key and value. Qwen3: norms of queries
and keys. Qwen3-MoE: as Qwen3, with experts in place of the MLP.

Shapes: T tokens of the batch, N rows, D hidden, E head size, V vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import nn

from vcli.runtime.distributed.collectives import PartialSum, total
from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.layers.attention import AttentionBackend, AttentionStep
from vcli.runtime.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vcli.runtime.layers.linear import LinearBase, can_pack
from vcli.runtime.layers.moe import SparseMoe
from vcli.runtime.layers.ops import TORCH_OPS, LayerOps, RopeInputs
from vcli.runtime.layers.rotary import RotaryEmbedding
from vcli.runtime.layers.share import even_share
from vcli.runtime.layers.weights import WeightSlice
from vcli.runtime.models.blocks import DecoderLayer, LayerStep, Placement, make_norm
from vcli.topology.model_spec import ModelSpec


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
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.context = context
        self.dtype = dtype
        self.device = device
        self.layer_span = layer_span
        self.attention_backend = attention_backend
        self._ops = ops
        place = Placement(group=context.tp, dtype=dtype, device=device, ops=ops)
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
        self.norm = make_norm(spec, place, spec.hidden_size) if context.pp.is_last else None
        self.lm_head: ParallelLMHead | None = None
        if context.pp.is_last:
            tied = self.embed_tokens if spec.tie_word_embeddings else None
            self.lm_head = ParallelLMHead(
                *vocabulary, group=context.tp, dtype=dtype, device=device, tied_to=tied, ops=ops
            )

    @property
    def can_capture(self) -> bool:
        """Whether no layer waits for the device, as experts do to learn who goes where."""
        return not any(isinstance(module, SparseMoe) for module in self.modules())

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionStep,
        intermediate: Mapping[str, torch.Tensor] | None = None,
        rows_N: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Hidden states (T, D) from the last stage; what the next stage needs from the others.

        `intermediate` is what the previous stage gave; the first stage has none. With `rows_N`
        (int64, at least one) the last stage gives those of these tokens alone, (N, D), and spares
        the others most of its last layer.
        """
        x_TD: torch.Tensor | PartialSum
        residual_TD: torch.Tensor | None
        if self.embed_tokens is not None:
            x_TD, residual_TD = self.embed(input_ids_T), None
        else:
            assert intermediate is not None, (
                "a later pipeline stage needs the previous one's output"
            )
            x_TD, residual_TD = intermediate["hidden"], intermediate["residual"]
        step = self.layer_step(positions_T, attention)
        last = len(self.layers) - 1 if self.norm is not None else None
        for index, layer in enumerate(self.layers):
            rows = rows_N if index == last else None
            x_TD, residual_TD = layer(x_TD, residual_TD, step, rows)
        if self.norm is None:
            assert residual_TD is not None, "a pipeline stage has at least one layer"
            return {"hidden": total(x_TD), "residual": residual_TD}
        return self.end(x_TD, residual_TD)

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """(T, D), on the first stage."""
        assert self.embed_tokens is not None, "only the first pipeline stage has the embedding"
        embedded: torch.Tensor = self.embed_tokens(input_ids_T)
        return embedded

    def end(
        self, x_TD: torch.Tensor | PartialSum, residual_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """What the last layer gave, with the last norm; on the last stage."""
        assert self.norm is not None, "only the last pipeline stage has the norm"
        normed_TD, _ = self.norm.add_and_norm(x_TD, residual_TD)
        return normed_TD

    def layer_step(
        self,
        positions_T: torch.Tensor,
        attention: AttentionStep,
        queries_THE: torch.Tensor | None = None,
    ) -> LayerStep:
        """What the layers of a step share; see `LayerStep`."""
        if self._ops.rope_and_cache is None:
            cos_sin = self.rotary.cos_sin(positions_T, self.dtype)
            return LayerStep(
                attention=attention, rope=None, cos_sin=cos_sin, queries_THE=queries_THE
            )
        rope = RopeInputs(
            positions_T=positions_T,
            table_PE=self.rotary.table(self.spec.max_position_embeddings),
            slot_mapping_T=attention.slot_mapping,
        )
        return LayerStep(attention=attention, rope=rope, cos_sin=None, queries_THE=queries_THE)

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits (N, V), float32, on every TP rank of the last stage."""
        assert self.lm_head is not None, "only the last pipeline stage has the head"
        return self.lm_head.compute_logits(hidden_ND)

    def compute_local_logits(
        self, hidden_ND: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of this rank's part of the vocabulary; see `ParallelLMHead`."""
        assert self.lm_head is not None, "only the last pipeline stage has the head"
        return self.lm_head.compute_local_logits(hidden_ND, out)

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
