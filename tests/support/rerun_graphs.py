"""Graphs on a CPU: what would be captured runs again at each replay, padding included."""

from dataclasses import fields, replace

import torch

from vcli.runtime.layers.attention import AttentionStep
from vcli.runtime.layers.attention_torch import TorchAttention
from vcli.runtime.worker.decode_graphs import (
    NUM_BUFFERS,
    DecodeGraphs,
    DecodeStep,
    _Captured,
)
from vcli.runtime.worker.device_batch import NUM_COLUMNS
from vcli.runtime.worker.prompt_graphs import PromptGraphs
from vcli.topology.graph_sizes import graph_sizes


class LatePlan(TorchAttention):
    """Attention that looks at a step's lengths when it begins, as kernels on a device do."""

    def __init__(self, scratch_slot: int) -> None:
        super().__init__()
        self._scratch_slot = scratch_slot
        self._late = None

    def begin(self, plan) -> None:
        """`plan` is the metadata."""
        plan.slot_mapping.masked_fill_(plan.slot_mapping < 0, self._scratch_slot)
        plan.seq_lens.clamp_(min=1)
        self._late = self.plan(replace(plan, seq_lens_cpu=plan.seq_lens.tolist()))

    def attend(self, query_THE, kv_cache, plan, scale, out=None):
        """As the base, by what `begin` found."""
        return super().attend(query_THE, kv_cache, self._late, scale, out)


class Rerun:
    """In the place of a CUDA graph."""

    def __init__(self, run) -> None:
        self._run = run
        self.output = run()

    def replay(self) -> None:
        """The step once more; its output stands where the first one's does."""
        output = self._run()
        for field in fields(output):
            getattr(self.output, field.name).copy_(getattr(output, field.name))


class RerunGraphs(DecodeGraphs):
    """`DecodeGraphs` whose graphs are `Rerun`s."""

    def __init__(self, model, step: DecodeStep, scratch_row: int, scratch_slot: int) -> None:
        super().__init__(model, step, scratch_row)
        self._attention = LatePlan(scratch_slot)

    def capture(self, sizes, progress) -> None:
        """One for each size."""
        del progress
        self._hosts = [
            torch.zeros(NUM_COLUMNS * sizes[-1], dtype=torch.int32) for _ in range(NUM_BUFFERS)
        ]
        for size in sizes:
            self._send(self._columns(size))
            metadata = self._step.metadata(size)
            attention = AttentionStep(
                backend=self._attention, plan=metadata, slot_mapping=metadata.slot_mapping
            )
            graph = Rerun(lambda size=size, attention=attention: self._step.run(size, attention))
            self._captured[size] = _Captured(graph, None, graph.output)
        self._sizes = list(sizes)


class RerunPiece:
    """In the place of a CUDA graph between two attentions, which leaves all in buffers."""

    def __init__(self, run) -> None:
        self.replay = run


class RerunPrompts(PromptGraphs):
    """`PromptGraphs` whose graphs are `RerunPiece`s."""

    def capture(self, sizes, progress) -> None:
        """A list for each size."""
        del progress
        self._captured = {
            size: [
                RerunPiece(lambda index=index, size=size: self._step.run_piece(index, size))
                for index in range(len(self._step.layers))
            ]
            for size in sizes
        }
        self._sizes = list(sizes)


def rerun_graphs(runner) -> None:
    """Give a `DeviceModelRunner` on a CPU, which has a KV cache, such graphs."""
    limits, on_device = runner._config, runner._on_device
    sizes = graph_sizes(limits.scheduler.max_num_seqs)
    step = DecodeStep(
        runner.model,
        on_device,
        runner._sampler,
        runner._ops,
        block_size=runner._block_size,
        max_num_requests=sizes[-1],
        max_seq_len=limits.model.max_model_len,
    )
    scratch_slot = runner._scratch_block * runner._block_size
    runner._graphs = RerunGraphs(runner.model, step, on_device.scratch_row, scratch_slot)
    with torch.inference_mode():
        runner._graphs.capture(sizes, None)
    prompts = runner._prompt_sizes()
    runner._prompt_graphs = RerunPrompts(runner._prompt_step(prompts[-1]))
    runner._prompt_graphs.capture(prompts, None)
