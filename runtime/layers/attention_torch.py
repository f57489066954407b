"""Attention in plain torch: SDPA over blocks gathered from the cache. Any device, any dtype.

Shapes as in `attention`; besides, L context length, Q query tokens of one request, G query heads
of one kv head (H = K * G).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
import torch.nn.functional as F

from vcli.runtime.layers.attention import ForwardMetadata, IntArray

#: Decodes of one batch are padded to the longest: it may be at most this much longer than the
#: shortest, or this many tokens.
MAX_PADDING_RATIO = 1.5
FREE_PADDING_TOKENS = 128
#: Limit of the gathered context tokens of one batch of several decodes: bounds the workspace.
MAX_BATCH_TOKENS = 16_384
#: A prefill chunk with cached context needs an explicit mask, made for so many queries at a time.
QUERY_TILE = 512


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Decodes that are computed together; `tokens` index the batch of the step.

    `slots` (R * L) are cache rows. Padding repeats the last row of the same request: rows of
    others, or never written ones, could hold NaN, which no mask takes away.
    `is_context` (R, 1, 1, L) is False on padding; None where all are equally long.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    num_requests: int
    is_context: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One request with several query tokens, [start, end) of the batch; `slots` (L) as above."""

    start: int
    end: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """How the requests of a step are grouped."""

    decodes: tuple[DecodeBatch, ...]
    prefills: tuple[PrefillChunk, ...]


class TorchAttention:
    """The reference back end. Holds a workspace, so one thread at a time may use it."""

    name = "torch"
    has_graphs = False
    has_host_plan = False

    def __init__(self) -> None:
        self._workspace = torch.empty(0)

    def plan(self, metadata: ForwardMetadata) -> TorchPlan:
        """Decodes in batches of similar length, prefill chunks one by one."""
        starts = list(accumulate(metadata.query_lens_cpu, initial=0))
        decodes, prefills = [], []
        for request, query_len in enumerate(metadata.query_lens_cpu):
            if query_len == 1:
                decodes.append(request)
            elif query_len > 1:
                slots = _slots(metadata, [request]).flatten()
                prefills.append(PrefillChunk(starts[request], starts[request + 1], slots))
        return TorchPlan(
            decodes=tuple(
                _decode_batch(metadata, requests, starts)
                for requests in group_by_length(decodes, metadata.seq_lens_cpu)
            ),
            prefills=tuple(prefills),
        )

    def begin(self, plan: TorchPlan) -> None:
        """Nothing to do."""

    def attend(
        self,
        query_THE: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: TorchPlan,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T, H, E); rows of tokens that belong to no request are zero."""
        if len(query_THE) == 1 and plan.decodes and out is None:
            return self._decode(query_THE, kv_cache, plan.decodes[0], scale)
        output_THE = torch.zeros_like(query_THE) if out is None else out.zero_()
        for batch in plan.decodes:
            queries = query_THE.index_select(0, batch.tokens)
            output_THE.index_copy_(0, batch.tokens, self._decode(queries, kv_cache, batch, scale))
        for chunk in plan.prefills:
            queries = query_THE[chunk.start : chunk.end]
            output_THE[chunk.start : chunk.end] = _prefill(queries, kv_cache, chunk, scale)
        return output_THE

    def capture_plan(self, metadata: ForwardMetadata) -> TorchPlan:
        """Not possible: how requests are grouped depends on their lengths."""
        raise NotImplementedError("attention in torch has no CUDA graphs")

    def update_plan(self, plan: TorchPlan, seq_lens: IntArray, block_tables: IntArray) -> None:
        """Not possible, as there is no such plan."""
        raise NotImplementedError("attention in torch has no CUDA graphs")

    def _decode(
        self, query_RHE: torch.Tensor, kv_cache: torch.Tensor, batch: DecodeBatch, scale: float
    ) -> torch.Tensor:
        num_requests, num_heads, head_size = query_RHE.shape
        gathered = self._gather(kv_cache, batch.slots)
        keys, values = gathered.view(2, num_requests, -1, *kv_cache.shape[3:]).transpose(2, 3)
        # The query heads of a kv head are the rows of one query: with enable_gqa, torch's CPU
        # kernel takes several times longer in bfloat16.
        query_RKGE = query_RHE.reshape(num_requests, keys.shape[1], -1, head_size)
        output = F.scaled_dot_product_attention(
            query_RKGE, keys, values, attn_mask=batch.is_context, scale=scale
        )
        return output.reshape(num_requests, num_heads, head_size)

    def _gather(self, kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows (2, slots, K * E) of the cache, valid until the next call.

        Fresh memory for each layer would cost more in page faults than the copy itself.
        """
        rows = kv_cache.flatten(3).flatten(1, 2)
        shape = (2, slots.numel(), rows.shape[2])
        num_elements = prod(shape)
        workspace = self._workspace
        is_alike = workspace.dtype == rows.dtype and workspace.device == rows.device
        if not is_alike or workspace.numel() < num_elements:
            self._workspace = workspace = rows.new_empty(num_elements)
        gathered = workspace[:num_elements].view(shape)
        for cache, out in zip(rows, gathered, strict=True):
            torch.index_select(cache, 0, slots, out=out)
        return gathered


def group_by_length(requests: Sequence[int], seq_lens: Sequence[int]) -> list[list[int]]:
    """`requests` in groups whose padding to the longest wastes little, shortest first."""
    groups: list[list[int]] = []
    shortest = 0
    for request in sorted(requests, key=lambda request: seq_lens[request]):
        length = seq_lens[request]
        allowed = max(shortest * MAX_PADDING_RATIO, shortest + FREE_PADDING_TOKENS)
        if groups and length <= allowed and (len(groups[-1]) + 1) * length <= MAX_BATCH_TOKENS:
            groups[-1].append(request)
        else:
            groups.append([request])
            shortest = length
    return groups


def _slots(metadata: ForwardMetadata, requests: Sequence[int]) -> torch.Tensor:
    """Cache rows (R, L) of the contexts of `requests`; behind its end, a context's last row."""
    table = metadata.block_tables
    lengths = [metadata.seq_lens_cpu[request] for request in requests]
    chosen = torch.tensor(requests, device=table.device)
    positions = torch.arange(max(lengths), device=table.device)
    last = metadata.seq_lens.index_select(0, chosen)[:, None] - 1
    positions = torch.minimum(positions, last)
    rows = chosen if metadata.rows is None else metadata.rows.index_select(0, chosen)
    blocks = table.index_select(0, rows).long().gather(1, positions // metadata.block_size)
    return blocks * metadata.block_size + positions % metadata.block_size


def _decode_batch(
    metadata: ForwardMetadata, requests: list[int], starts: Sequence[int]
) -> DecodeBatch:
    device = metadata.block_tables.device
    lengths = torch.tensor([metadata.seq_lens_cpu[request] for request in requests])
    slots = _slots(metadata, requests)
    is_context = None
    if int(lengths.min()) < slots.shape[1]:
        is_context = torch.arange(slots.shape[1]) < lengths[:, None]
        is_context = is_context[:, None, None, :].to(device)
    return DecodeBatch(
        tokens=torch.tensor([starts[request] for request in requests], device=device),
        slots=slots.flatten(),
        num_requests=len(requests),
        is_context=is_context,
    )


def _prefill(
    query_QHE: torch.Tensor, kv_cache: torch.Tensor, chunk: PrefillChunk, scale: float
) -> torch.Tensor:
    num_queries, num_heads, head_size = query_QHE.shape
    context_len = chunk.slots.numel()
    num_kv_heads = kv_cache.shape[3]
    group_size = num_heads // num_kv_heads
    # A kv head is a batch entry, its query heads are the heads: keys and values (K, G, L, E) are
    # shared by a stride of 0 instead of copies.
    query_KGQE = query_QHE.view(num_queries, num_kv_heads, group_size, head_size).permute(
        1, 2, 0, 3
    )
    keys, values = (
        cache.index_select(0, chunk.slots)
        .transpose(0, 1)[:, None]
        .expand(num_kv_heads, group_size, context_len, head_size)
        for cache in kv_cache.flatten(1, 2)
    )
    num_cached = context_len - num_queries
    if num_cached == 0:
        output = F.scaled_dot_product_attention(
            query_KGQE, keys, values, is_causal=True, scale=scale
        )
    else:
        output = _attend_in_tiles(query_KGQE, keys, values, num_cached, scale)
    return output.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)


def _attend_in_tiles(
    query_KGQE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_cached: int,
    scale: float,
) -> torch.Tensor:
    tiles = []
    num_queries = query_KGQE.shape[2]
    for start in range(0, num_queries, QUERY_TILE):
        end = min(start + QUERY_TILE, num_queries)
        visible = num_cached + end
        last_visible = torch.arange(num_cached + start, visible, device=keys.device)
        mask = torch.arange(visible, device=keys.device) <= last_visible[:, None]
        tiles.append(
            F.scaled_dot_product_attention(
                query_KGQE[:, :, start:end],
                keys[:, :, :visible],
                values[:, :, :visible],
                attn_mask=mask,
                scale=scale,
            )
        )
    return torch.cat(tiles, dim=2)
