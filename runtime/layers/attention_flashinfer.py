"""Attention by FlashInfer's paged kernels: CUDA, bfloat16 and float16, head sizes 64, 128, 256.

Shapes as in `attention`. Decodes and prefills use one compiled module, FlashInfer's `fa2` prefill:
its tensor cores also serve the queries of a decode, which are few. FlashInfer compiles it with nvcc
and ninja at the first plan on a machine, for half a minute and more.

FlashInfer plans on the host and copies the plan to the device without waiting, on the current
stream. So all work of one back end must be on one stream, and the pinned memory that a copy reads
is written again only after the event behind that copy: the host waits there only if it is two
steps ahead of the device.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from vcli.runtime.layers.attention import ForwardMetadata, IntArray
from vcli.topology.errors import UnfitError

LongArray = npt.NDArray[np.int64]

KV_LAYOUT: Final = "NHD"
#: `auto` would take FlashInfer's `fa3` for prefills on Hopper: a second module, compiled three
#: times as long.
KERNEL_BACKEND: Final = "fa2"
#: The plan of a captured step: a few numbers for each block of threads.
GRAPH_PLAN_BYTES: Final = 2**20
#: Blocks of threads on one multiprocessor that FlashInfer reckons with when it splits contexts.
BLOCKS_PER_SM: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerPlan:
    """Valid until the next `plan`: FlashInfer keeps it in the wrapper."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Static buffers of R decodes. Both hold indptr (R + 1,), last page lengths (R,), blocks."""

    wrapper: Any
    num_requests: int
    block_size: int
    staging: torch.Tensor
    """int32, pinned."""
    buffer: torch.Tensor
    """int32, on the device: what the graph reads."""
    copied: torch.cuda.Event
    """Behind the last copies out of pinned memory."""


class FlashInferAttention:
    """The heads of one rank. One thread and one stream at a time may use it.

    Raises:
        UnfitError: FlashInfer is not installed, or cannot be imported.
    """

    name = "flashinfer"
    has_graphs = True
    has_host_plan = True

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._flashinfer = import_flashinfer()
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_size = head_size
        self._dtype = dtype
        self._device = device
        self._workspace = torch.zeros(0, dtype=torch.uint8, device=device)
        self._eager = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace_for(num_decodes=0), KV_LAYOUT, backend=KERNEL_BACKEND
        )
        self._eager_copied = _new_event()
        # One for all graphs: each replay is preceded by its own plan, on the same stream.
        self._graph_plan = torch.empty(GRAPH_PLAN_BYTES, dtype=torch.uint8, device=device)

    def plan(self, metadata: ForwardMetadata) -> EagerPlan:
        """Any mix of prefills and decodes; waits for the copies of the plan before."""
        self._eager_copied.synchronize()
        query_start_loc = np.zeros(metadata.num_requests + 1, dtype=np.int32)
        np.cumsum(metadata.query_lens_cpu, out=query_start_loc[1:])
        seq_lens = np.asarray(metadata.seq_lens_cpu, dtype=np.int32)
        indptr, last_block_lens = paged_layout(seq_lens, metadata.block_size)
        self._eager.plan(
            qo_indptr=torch.from_numpy(query_start_loc),
            paged_kv_indptr=torch.from_numpy(indptr),
            paged_kv_indices=_blocks_on_device(metadata, indptr),
            paged_kv_last_page_len=torch.from_numpy(last_block_lens),
            head_dim_qk=self._head_size,
            causal=True,
            max_token_per_sequence=metadata.max_query_len,
            **self._shape(metadata.block_size),
        )
        self._eager_copied.record()
        return EagerPlan(num_tokens=int(query_start_loc[-1]))

    def begin(self, plan: Any) -> None:
        """Nothing to do."""

    def attend(
        self,
        query_THE: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: EagerPlan | GraphPlan,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T, H, E); rows of tokens that belong to no request are zero."""
        if isinstance(plan, GraphPlan):
            wrapper, num_tokens = plan.wrapper, plan.num_requests
        else:
            wrapper, num_tokens = self._eager, plan.num_tokens
        output_THE = query_THE.new_empty(query_THE.shape) if out is None else out
        # Planned for a scale of 1, which run() multiplies by that of the query.
        wrapper.run(
            query_THE[:num_tokens],
            (kv_cache[0], kv_cache[1]),
            q_scale=scale,
            out=output_THE[:num_tokens],
        )
        if num_tokens < len(output_THE):
            output_THE[num_tokens:].zero_()
        return output_THE

    def capture_plan(self, metadata: ForwardMetadata) -> GraphPlan:
        """For as many decodes, and blocks of each, as `metadata` has room for.

        Not while a graph is captured: it plans for contexts of one token in block 0. The largest
        number of decodes should come first: the workspace of a smaller one is part of its.
        """
        num_requests, max_blocks = metadata.num_requests, metadata.block_tables.shape[1]
        size = 2 * num_requests + 1 + num_requests * max_blocks
        buffer = torch.zeros(size, dtype=torch.int32, device=self._device)
        workspace = self._workspace_for(num_decodes=num_requests)
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            KV_LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer[: num_requests + 1],
            paged_kv_indices_buffer=buffer[2 * num_requests + 1 :],
            paged_kv_last_page_len_buffer=buffer[num_requests + 1 : 2 * num_requests + 1],
            backend=KERNEL_BACKEND,
        )
        wrapper.reset_workspace_buffer(workspace, self._graph_plan)
        # Only the full plan() loads the kernels; update_plan needs them loaded.
        wrapper.plan(
            indptr=torch.arange(num_requests + 1, dtype=torch.int32),
            indices=torch.zeros(num_requests, dtype=torch.int32),
            last_page_len=torch.ones(num_requests, dtype=torch.int32),
            head_dim=self._head_size,
            **self._shape(metadata.block_size),
        )
        copied = _new_event()
        copied.record()
        return GraphPlan(
            wrapper=wrapper,
            num_requests=num_requests,
            block_size=metadata.block_size,
            staging=torch.zeros(size, dtype=torch.int32, pin_memory=True),
            buffer=buffer,
            copied=copied,
        )

    def update_plan(self, plan: GraphPlan, seq_lens: IntArray, block_tables: IntArray) -> None:
        """Copies and plans on the current stream, behind a replay that is under way."""
        assert len(seq_lens) == plan.num_requests, f"{len(seq_lens)} of {plan.num_requests}"
        plan.copied.synchronize()
        indptr, last_block_lens = paged_layout(seq_lens, plan.block_size)
        blocks = used_blocks(block_tables, indptr)
        num_requests, start = plan.num_requests, 2 * plan.num_requests + 1
        end = start + len(blocks)
        assert end <= len(plan.buffer), f"{len(blocks)} blocks, room for {len(plan.buffer)}"
        np.concatenate((indptr, last_block_lens, blocks), out=plan.staging[:end].numpy())
        plan.buffer[:end].copy_(plan.staging[:end], non_blocking=True)
        self._flashinfer.fast_decode_plan(
            plan.wrapper,
            indptr=plan.staging[: num_requests + 1],
            indices=plan.staging[start:end],
            last_page_len=plan.staging[num_requests + 1 : start],
            head_dim=self._head_size,
            **self._shape(plan.block_size),
        )
        plan.copied.record()

    def _shape(self, block_size: int) -> dict[str, Any]:
        """What every plan says, by FlashInfer's names."""
        return {
            "num_qo_heads": self._num_heads,
            "num_kv_heads": self._num_kv_heads,
            "page_size": block_size,
            "sm_scale": 1.0,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def _workspace_for(self, *, num_decodes: int) -> torch.Tensor:
        """Shared by all plans so far, unless it is too small for this one."""
        needed = workspace_bytes(
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_size=self._head_size,
            num_decodes=num_decodes,
            num_sms=torch.cuda.get_device_properties(self._device).multi_processor_count,
        )
        if self._workspace.numel() < needed:
            # Captured plans keep the former one: powers of two, so that all sizes that come
            # smallest first together take no more than twice the largest.
            size = 1 << (needed - 1).bit_length()
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._workspace


def import_flashinfer() -> Any:
    """The module; it makes its cache folder and, on a machine with GPUs, a CUDA context.

    Raises:
        UnfitError: it is not installed, or something that it needs is missing.
    """
    try:
        return import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise UnfitError(
            f"FlashInfer cannot be imported: {error}",
            hint="pip install 'vcli-toolkit[gpu]', or --attention-backend triton",
        ) from error


def paged_layout(seq_lens: IntArray, block_size: int) -> tuple[IntArray, IntArray]:
    """Where each request's blocks start (R + 1,), and tokens in its last block (R,): 1 to S.

    `seq_lens` (R,) are at least 1.
    """
    indptr: IntArray = np.zeros(len(seq_lens) + 1, dtype=np.int32)
    last_indices = (seq_lens - 1) // block_size
    np.cumsum(last_indices + 1, out=indptr[1:])
    return indptr, (seq_lens - last_indices * block_size).astype(np.int32)


def block_cells(indptr: IntArray) -> LongArray:
    """(2, blocks of all): request and column in its table of each block, request by request."""
    num_blocks = np.diff(indptr)
    cells: LongArray = np.empty((2, indptr[-1]), dtype=np.int64)
    cells[0] = np.repeat(np.arange(len(num_blocks)), num_blocks)
    cells[1] = np.arange(indptr[-1]) - np.repeat(indptr[:-1], num_blocks)
    return cells


def used_blocks(block_tables: IntArray, indptr: IntArray) -> IntArray:
    """The blocks of all requests without the padding, from tables (R, max blocks)."""
    num_blocks = np.diff(indptr)
    assert num_blocks.max() <= block_tables.shape[1], "a context is longer than its table"
    used: IntArray = block_tables[np.arange(block_tables.shape[1]) < num_blocks[:, None]]
    return used


def workspace_bytes(
    *, num_heads: int, num_kv_heads: int, head_size: int, num_decodes: int, num_sms: int
) -> int:
    """Upper bound of what FlashInfer needs for contexts that it splits over multiprocessors.

    A part is a float32 output and a sum for each query of a tile. Of eager parts (`num_decodes` 0)
    there are as many as blocks of threads, of full tiles; in a graph at least one for each decode.
    """
    group_size = num_heads // num_kv_heads
    max_parts = num_sms * BLOCKS_PER_SM // num_kv_heads
    full_tile = 128 if head_size < 256 else 64
    tile = full_tile
    if num_decodes:
        tile = 16 if group_size <= 16 else 64 if group_size <= 64 else full_tile
        num_tiles = -(-num_decodes * group_size // tile) + num_decodes - 1
        max_parts = max(max_parts, num_tiles)
    alignment = 2 * 16
    return num_heads * max_parts * tile * (head_size + 1) * 4 + alignment


def _blocks_on_device(metadata: ForwardMetadata, indptr: IntArray) -> torch.Tensor:
    """(blocks of all,) int32; does not wait for the device."""
    tables = metadata.block_tables
    cells = torch.from_numpy(block_cells(indptr)).pin_memory()
    requests, columns = cells.to(tables.device, non_blocking=True)
    rows = requests if metadata.rows is None else metadata.rows.index_select(0, requests)
    return tables[rows, columns]


def _new_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event
