"""Attention by our own Triton kernels, which read the paged cache and need no plan from the host.

Shapes as in `attention`.
"""

import itertools
from dataclasses import dataclass

import torch

from vcli.runtime.layers.attention import ForwardMetadata, IntArray
from vcli.runtime.layers.kernels import (
    DecodePlan,
    DecodeWorkspace,
    paged_decode,
    paged_prefill,
    plan_decode,
)
from vcli.runtime.layers.kernels.hopper_check import (
    AttentionSizes,
    decodes_by_pages,
    prefills_by_pages,
)
from vcli.runtime.layers.kernels.launch import LayerLaunches, next_power_of_2


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The tensors of a step; `rows` index `metadata.block_tables`.

    Requests `alone`, with one query token each, stand together in the batch from `first_token` on;
    `decodes` is their plan. A decode elsewhere is attended to like a chunk.
    """

    metadata: ForwardMetadata
    rows: torch.Tensor
    alone: range
    first_token: int
    decodes: DecodePlan
    by_pages: bool
    """Whether chunks are attended to by the kernel for Hopper."""
    decode_launches: LayerLaunches
    chunk_launches: LayerLaunches


class TritonAttention:
    """bfloat16 and float16 on CUDA. One stream at a time may use it: layers share a workspace."""

    name = "triton"
    has_graphs = True
    has_host_plan = False

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_size = head_size
        self._dtype = dtype
        # All of them: graphs point into those they were captured with.
        self._workspaces: list[DecodeWorkspace] = []

    def plan(self, metadata: ForwardMetadata) -> TritonPlan:
        """Nothing is computed."""
        device = metadata.seq_lens.device
        rows = metadata.rows
        if rows is None:
            rows = torch.arange(metadata.num_requests, dtype=torch.int32, device=device)
        alone = _longest_run_of_decodes(metadata)
        sizes = AttentionSizes(
            self._num_heads // self._num_kv_heads,
            self._head_size,
            metadata.block_size,
            self._dtype,
            device,
        )
        return TritonPlan(
            metadata,
            rows,
            alone,
            sum(metadata.query_lens_cpu[: alone.start]),
            self._workspace(len(alone), sizes).plan(len(alone)),
            prefills_by_pages(sizes),
            LayerLaunches(),
            LayerLaunches(),
        )

    def begin(self, plan: TritonPlan) -> None:
        """Plan the decodes on the device."""
        alone = slice(plan.alone.start, plan.alone.stop)
        plan_decode(plan.decodes, plan.rows[alone], plan.metadata.seq_lens[alone])

    def attend(
        self,
        query_THE: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: TritonPlan,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T, H, E)."""
        metadata = plan.metadata
        tokens = slice(plan.first_token, plan.first_token + len(plan.alone))
        output_THE = torch.empty_like(query_THE) if out is None else out
        paged_decode(
            query_THE[tokens],
            kv_cache,
            metadata.block_tables,
            plan.decodes,
            scale,
            out=output_THE[tokens],
            launches=plan.decode_launches,
        )
        paged_prefill(
            query_THE,
            kv_cache,
            metadata.block_tables,
            plan.rows,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            scale,
            out=output_THE,
            skipped=plan.alone,
            by_pages=plan.by_pages,
            launches=plan.chunk_launches,
        )
        return output_THE

    def capture_plan(self, metadata: ForwardMetadata) -> TritonPlan:
        """As `plan`: the kernels read lengths and rows on the device."""
        return self.plan(metadata)

    def update_plan(self, plan: TritonPlan, seq_lens: IntArray, block_tables: IntArray) -> None:
        """Nothing to do."""

    def _workspace(self, num_requests: int, sizes: AttentionSizes) -> DecodeWorkspace:
        if not self._workspaces or num_requests > self._workspaces[-1].max_num_seqs:
            self._workspaces.append(
                DecodeWorkspace(
                    # Without graphs batches grow bit by bit: not each has one of its own.
                    next_power_of_2(max(num_requests, 1)),
                    self._num_heads,
                    self._num_kv_heads,
                    self._head_size,
                    sizes.device,
                    by_pages=decodes_by_pages(sizes),
                )
            )
        return self._workspaces[-1]


def _longest_run_of_decodes(metadata: ForwardMetadata) -> range:
    if metadata.max_query_len == 1:
        return range(metadata.num_requests)
    longest, begin = range(0), 0
    for is_decode, run in itertools.groupby(metadata.query_lens_cpu, key=lambda count: count == 1):
        end = begin + sum(1 for _ in run)
        if is_decode and end - begin > len(longest):
            longest = range(begin, end)
        begin = end
    return longest
