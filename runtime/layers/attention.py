"""Attention over a paged KV cache: the layer, what it is told about a step, the back ends.

Shapes: T tokens of the batch, R requests, H query heads here, K kv heads here, E head size,
B blocks, S block size. A KV cache is (2, B, S, K, E): keys, then values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMetadata:
    """The requests of one step. Their tokens stand one after the other in the batch.

    A request's query tokens are the last of its context: its cached tokens come before them, and
    their own keys and values are written to `slot_mapping` before anything is attended to.
    A decode is a request with one query token.
    """

    num_tokens: int
    num_requests: int
    query_start_loc: torch.Tensor
    """(R + 1,) int32: first token of each request; the last entry is T."""
    seq_lens: torch.Tensor
    """(R,) int32: context with the tokens of this step."""
    block_tables: torch.Tensor
    """(rows, max blocks) int32, padded with 0."""
    rows: torch.Tensor | None = None
    """(R,) int32: the row of each request in `block_tables`; None: request i has row i."""
    slot_mapping: torch.Tensor
    """(T,) int64: block * block size + offset in the block."""
    block_size: int
    max_query_len: int
    max_seq_len: int
    query_lens_cpu: Sequence[int]
    """Query tokens of each request, for code that may not wait for the device."""
    seq_lens_cpu: Sequence[int]
    """`seq_lens` as Python numbers."""


class AttentionBackend(Protocol):
    """A way to compute attention. `plan` runs once per step, `attend` once per layer.

    `kv_cache` holds the new keys and values already.
    """

    name: str
    has_graphs: bool
    """Whether a step of decodes can be captured in a CUDA graph."""
    has_host_plan: bool
    """Whether such a graph needs `update_plan`."""

    def plan(self, metadata: ForwardMetadata) -> Any:
        """What `attend` needs to know, the same for all layers."""

    def begin(self, plan: Any) -> None:
        """Launch what all layers need; once before them, and captured with them."""

    def attend(
        self,
        query_THE: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: Any,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T, H, E), in `out` where one is given."""

    def capture_plan(self, metadata: ForwardMetadata) -> Any:
        """A plan for a graph: its decodes are those of `metadata`, whose tensors stay.

        What they hold when the graph is replayed counts, so nothing may be read from them now.
        """

    def update_plan(self, plan: Any, seq_lens: IntArray, block_tables: IntArray) -> None:
        """Before each replay: lengths (R,) and blocks (R, max blocks) of its requests.

        Padding has length 1 and block 0.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """One step as every layer sees it: where to write, and the back end's plan."""

    backend: AttentionBackend
    plan: Any
    slot_mapping: torch.Tensor
    """(T,) int64."""

    @classmethod
    def planned(cls, backend: AttentionBackend, metadata: ForwardMetadata) -> "AttentionStep":
        """The step that `metadata` describes, begun."""
        plan = backend.plan(metadata)
        step = cls(backend=backend, plan=plan, slot_mapping=metadata.slot_mapping)
        step.begin()
        return step

    def begin(self) -> None:
        """Before the first layer."""
        self.backend.begin(self.plan)

    def attend(
        self,
        query_THE: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T, H, E), in `out` where one is given."""
        return self.backend.attend(query_THE, kv_cache, self.plan, scale, out)


class Attention(nn.Module):
    """A layer's cache: takes the keys and values of a step, then attends to whole contexts."""

    kv_cache: torch.Tensor

    def __init__(
        self,
        layer_index: int,
        num_heads_local: int,
        num_kv_heads_local: int,
        head_size: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_heads = num_heads_local
        self.num_kv_heads = num_kv_heads_local
        self.head_size = head_size
        self.scale = scale
        # Not a buffer: it belongs to the worker and must not follow the module's dtype or device.
        self.kv_cache = torch.empty(2, 0, 1, num_kv_heads_local, head_size)

    def write(
        self, key_TKE: torch.Tensor, value_TKE: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        """Into this layer's cache."""
        keys, values = self.kv_cache.flatten(1, 2)
        keys.index_copy_(0, slot_mapping_T, key_TKE)
        values.index_copy_(0, slot_mapping_T, value_TKE)

    def forward(
        self, query_THE: torch.Tensor, step: AttentionStep, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(T, H, E), in `out` where one is given: the step's keys and values are in the cache."""
        return step.attend(query_THE, self.kv_cache, self.scale, out)


def attention_layers(model: nn.Module) -> list[Attention]:
    """The attention layers of a model, in the order of their decoder layers."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return sorted(layers, key=lambda layer: layer.layer_index)


def bind_kv_cache(model: nn.Module, caches: Sequence[torch.Tensor]) -> None:
    """Gives each attention layer of `model` its cache (2, B, S, K, E), in layer order."""
    layers = attention_layers(model)
    assert len(layers) == len(caches), f"{len(caches)} caches for {len(layers)} attention layers"
    for layer, cache in zip(layers, caches, strict=True):
        heads_and_size = (layer.num_kv_heads, layer.head_size)
        assert tuple(cache.shape[3:]) == heads_and_size, f"{cache.shape} for {heads_and_size}"
        assert cache.is_contiguous(), "writes through a view of a strided cache would be lost"
        layer.kv_cache = cache
