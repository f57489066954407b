"""Steps of decodes as CUDA graphs: one for each batch size up to the largest.

A graph holds everything from the packed inputs to the sampled tokens. A step copies its columns
to the device, replays the graph of the next larger size, and reads the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vcli.runtime.layers.attention import AttentionStep, ForwardMetadata, IntArray
from vcli.runtime.models.decoder import CausalLM
from vcli.runtime.worker.device_batch import NUM_COLUMNS, DeviceBatch
from vcli.runtime.worker.device_sampler import DeviceSampler
from vcli.runtime.worker.step_ops import DecodeInputs, StepOps

#: Host buffers in turn: a step's copy may wait on the device while later steps are prepared.
NUM_BUFFERS = 4


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What a step leaves on the device, valid until the next one: R requests and the padding."""

    local_logits: torch.Tensor
    token_ids: torch.Tensor
    best: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    plan: Any
    output: DecodeOutput


class DecodeStep:
    """The body of a graph, for any number of requests; runs without a graph as well."""

    def __init__(
        self,
        model: CausalLM,
        batch: DeviceBatch,
        sampler: DeviceSampler,
        ops: StepOps,
        *,
        block_size: int,
        max_num_requests: int,
        max_seq_len: int,
    ) -> None:
        self._model = model
        self._batch = batch
        self._sampler = sampler
        self._ops = ops
        self._block_size = block_size
        self._max_seq_len = max_seq_len
        device = model.device
        self.packed = torch.zeros(NUM_COLUMNS * max_num_requests, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs.empty(max_num_requests, device)
        self._query_start_loc = torch.arange(max_num_requests + 1, dtype=torch.int32, device=device)
        head = model.lm_head
        assert head is not None, "a step of decodes samples: it needs the last stage"
        # One for all steps: each graph would keep its own, and others leave gaps as they grow.
        self._logits = head.weight.new_empty(max_num_requests, len(head.weight))

    def metadata(self, num_requests: int) -> ForwardMetadata:
        """The step as attention sees it; its numbers are in the tensors alone."""
        inputs = self._inputs
        return ForwardMetadata(
            num_tokens=num_requests,
            num_requests=num_requests,
            query_start_loc=self._query_start_loc[: num_requests + 1],
            seq_lens=inputs.seq_lens[:num_requests],
            block_tables=self._batch.block_tables,
            rows=inputs.rows[:num_requests],
            slot_mapping=inputs.slot_mapping[:num_requests],
            block_size=self._block_size,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
            query_lens_cpu=[1] * num_requests,
            seq_lens_cpu=[],
        )

    def logits(self, num_rows: int) -> torch.Tensor | None:
        """Memory for the logits of a step's `num_rows`, if there is so much; until the next one."""
        return self._logits[:num_rows] if num_rows <= len(self._logits) else None

    def run(self, num_requests: int, attention: AttentionStep) -> DecodeOutput:
        """From `packed` to tokens; a collective of the ranks that hold the model."""
        inputs = self._inputs
        used = DecodeInputs(
            input_ids=inputs.input_ids[:num_requests],
            positions=inputs.positions[:num_requests],
            slot_mapping=inputs.slot_mapping[:num_requests],
            rows=inputs.rows[:num_requests],
            seq_lens=inputs.seq_lens[:num_requests],
        )
        self._ops.prepare_decode(
            self.packed[: NUM_COLUMNS * num_requests].view(NUM_COLUMNS, num_requests),
            self._batch.block_tables,
            self._batch.last_token,
            self._block_size,
            used,
        )
        attention.begin()
        hidden = self._model(used.input_ids, used.positions, attention)
        assert isinstance(hidden, torch.Tensor), "a step of decodes samples: it needs all layers"
        local_logits = self._model.compute_local_logits(hidden, self.logits(num_requests))
        temperature = self._batch.temperature.index_select(0, used.rows)
        token_ids, best = self._sampler.sample(local_logits, temperature)
        self._batch.last_token.index_copy_(0, used.rows.long(), token_ids)
        return DecodeOutput(local_logits, token_ids, best)


class DecodeGraphs:
    """All graphs of one runner. They share a memory pool and the buffers of `step`."""

    def __init__(self, model: CausalLM, step: DecodeStep, scratch_row: int) -> None:
        self._backend = model.attention_backend
        self._step = step
        self._scratch_row = scratch_row
        self._captured: dict[int, _Captured] = {}
        self._sizes: list[int] = []
        self._hosts: list[torch.Tensor] = []
        self._turn = 0

    @property
    def largest(self) -> int:
        """Most requests of a step; 0 before `capture`."""
        return self._sizes[-1] if self._sizes else 0

    def size_for(self, num_requests: int) -> int:
        """Requests of the graph that runs a step of at most `largest`."""
        return next(size for size in self._sizes if size >= num_requests)

    def logits(self, num_rows: int) -> torch.Tensor | None:
        """See `DecodeStep.logits`."""
        return self._step.logits(num_rows)

    def capture(self, sizes: Sequence[int], progress: Callable[[float], None]) -> None:
        """Make the graphs, largest first: the others then fit into its memory.

        A collective of the ranks that hold the model; nothing else may use the device.
        """
        num_values = NUM_COLUMNS * sizes[-1]
        self._hosts = [
            torch.zeros(num_values, dtype=torch.int32, pin_memory=True) for _ in range(NUM_BUFFERS)
        ]
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for done, size in enumerate(reversed(sizes)):
            self._send(self._columns(size))
            metadata = self._step.metadata(size)
            plan = self._backend.capture_plan(metadata)
            attention = AttentionStep(
                backend=self._backend, plan=plan, slot_mapping=metadata.slot_mapping
            )
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # What is compiled, chosen or allocated at the first run must not be captured.
                self._step.run(size, attention)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads (NCCL's watchdog) may ask the device meanwhile.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                output = self._step.run(size, attention)
            self._captured[size] = _Captured(graph, plan, output)
            progress((done + 1) / len(sizes))
        self._sizes = list(sizes)

    def replay(
        self, num_requests: int, fill: Callable[[IntArray], None], host_tables: IntArray
    ) -> DecodeOutput:
        """Run a step of at most `largest` requests; `fill` writes their columns (5, R).

        `host_tables` are the block tables of all rows. Does not wait for the device.
        """
        size = self.size_for(num_requests)
        columns = self._columns(size)
        array = columns.numpy()
        fill(array)
        self._send(columns)
        captured = self._captured[size]
        if self._backend.has_host_plan:
            tables = np.zeros((size, host_tables.shape[1]), dtype=np.int32)
            tables[:num_requests] = host_tables[array[0, :num_requests]]
            self._backend.update_plan(captured.plan, np.maximum(array[1], 1), tables)
        captured.graph.replay()
        return captured.output

    def release(self) -> None:
        """Free the graphs; before the groups whose collectives they hold are destroyed."""
        self._captured.clear()
        self._sizes = []

    def _columns(self, size: int) -> torch.Tensor:
        """The next host buffer as (5, size), all padding."""
        self._turn = (self._turn + 1) % len(self._hosts)
        columns = self._hosts[self._turn][: NUM_COLUMNS * size].view(NUM_COLUMNS, size)
        columns[0] = self._scratch_row
        columns[1] = 0
        columns[2] = 0
        columns[3] = -1
        return columns

    def _send(self, columns: torch.Tensor) -> None:
        flat = columns.view(-1)
        self._step.packed[: len(flat)].copy_(flat, non_blocking=True)
