"""Attention by our own Triton kernels, which read the paged cache and need no plan from the host.

Shapes as in `attention`.
"""

from dataclasses import dataclass

import torch

from vcli.runtime.layers.attention import ForwardMetadata, IntArray
from vcli.runtime.layers.kernels import DecodeWorkspace, paged_decode, paged_prefill


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The tensors of a step; `rows` index `metadata.block_tables`."""

    metadata: ForwardMetadata
    rows: torch.Tensor


class TritonAttention:
    """bfloat16 and float16 on CUDA. One stream at a time may use it: layers share a workspace."""

    name = "triton"
    has_graphs = True
    has_host_plan = False

    def __init__(self) -> None:
        # All of them: graphs point into those they were captured with.
        self._workspaces: list[DecodeWorkspace] = []
        self._room = 0

    def plan(self, metadata: ForwardMetadata) -> TritonPlan:
        """Nothing is computed."""
        rows = metadata.rows
        if rows is None:
            device = metadata.seq_lens.device
            rows = torch.arange(metadata.num_requests, dtype=torch.int32, device=device)
        return TritonPlan(metadata, rows)

    def attend(
        self, query_THE: torch.Tensor, kv_cache: torch.Tensor, plan: TritonPlan, scale: float
    ) -> torch.Tensor:
        """(T, H, E)."""
        metadata = plan.metadata
        if metadata.max_query_len == 1:
            return paged_decode(
                query_THE,
                kv_cache,
                metadata.block_tables,
                plan.rows,
                metadata.seq_lens,
                scale,
                self._workspace(query_THE, kv_cache),
            )
        return paged_prefill(
            query_THE,
            kv_cache,
            metadata.block_tables,
            plan.rows,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            scale,
        )

    def capture_plan(self, metadata: ForwardMetadata) -> TritonPlan:
        """As `plan`: the kernels read lengths and rows on the device."""
        return self.plan(metadata)

    def update_plan(self, plan: TritonPlan, seq_lens: IntArray, block_tables: IntArray) -> None:
        """Nothing to do."""

    def _workspace(self, query_RHE: torch.Tensor, kv_cache: torch.Tensor) -> DecodeWorkspace:
        num_requests, num_heads, head_size = query_RHE.shape
        if num_requests > self._room:
            self._room = num_requests
            self._workspaces.append(
                DecodeWorkspace(
                    num_requests, num_heads, kv_cache.shape[3], head_size, query_RHE.device
                )
            )
        return self._workspaces[-1]
