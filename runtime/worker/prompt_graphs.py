"""Steps with prompts: what lies between two attentions as CUDA graphs, by the number of tokens.

    graph 0, attention of layer 0, graph 1, attention of layer 1, ..., the end of the last layer

Attention differs from step to step in the number of requests and their lengths, the rest only in
the number of tokens, which is padded. A small model's prompts would else take the host longer than
the device. The end is no graph: it computes the sampled tokens alone, and their number differs.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vcli.runtime.layers.attention import AttentionStep
from vcli.runtime.models.blocks import DecoderLayer
from vcli.runtime.models.decoder import CausalLM
from vcli.runtime.worker.metadata import DeviceInputs


class PromptStep:
    """The pieces, for any number of tokens, and the buffers between them; needs no graphs."""

    def __init__(self, model: CausalLM, *, max_num_tokens: int, scratch_slot: int) -> None:
        """The keys and values of padding go to `scratch_slot` of every cache."""
        self._model = model
        self.layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        self._scratch_slot = scratch_slot
        first = self.layers[0].self_attn.attention
        device, dtype = model.device, model.dtype
        numbers = torch.zeros(3, max_num_tokens, dtype=torch.int64, device=device)
        self._input_ids, self._positions, self._slot_mapping = numbers
        shape = (max_num_tokens, first.num_heads, first.head_size)
        self._queries = torch.zeros(shape, dtype=dtype, device=device)
        self._attended = torch.zeros(shape, dtype=dtype, device=device)
        self._residual = torch.zeros(
            max_num_tokens, model.spec.hidden_size, dtype=dtype, device=device
        )

    def fill(self, inputs: DeviceInputs, size: int) -> None:
        """Take a step's tokens; those up to `size` are padding."""
        num_tokens = inputs.metadata.num_tokens
        self._input_ids[:num_tokens].copy_(inputs.input_ids_T)
        self._positions[:num_tokens].copy_(inputs.positions_T)
        self._slot_mapping[:num_tokens].copy_(inputs.metadata.slot_mapping)
        if num_tokens < size:
            self._slot_mapping[num_tokens:size].fill_(self._scratch_slot)

    def run_piece(self, index: int, size: int) -> None:
        """From what the attention before layer `index` gave, or the tokens, to its queries."""
        attention = AttentionStep(
            backend=self._model.attention_backend,
            plan=None,
            slot_mapping=self._slot_mapping[:size],
        )
        step = self._model.layer_step(self._positions[:size], attention, self._queries[:size])
        kept = self._residual[:size]
        if index:
            x_TD, residual_TD = self.layers[index - 1].after_attention(self._attended[:size], kept)
            _, residual_TD = self.layers[index].before_attention(x_TD, residual_TD, step)
        else:
            x_TD = self._model.embed(self._input_ids[:size])
            _, residual_TD = self.layers[0].before_attention(x_TD, None, step)
        if residual_TD.data_ptr() != kept.data_ptr():
            kept.copy_(residual_TD)

    def run(
        self,
        run_piece: Callable[[int], None],
        num_tokens: int,
        attention: AttentionStep,
        rows_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hidden states of all tokens, or of `rows_N`, of a step that was filled in."""
        queries_THE, attended_THE = self._queries[:num_tokens], self._attended[:num_tokens]
        for index, layer in enumerate(self.layers):
            run_piece(index)
            layer.self_attn.attention(queries_THE, attention, attended_THE)
        x_TD, residual_TD = self.layers[-1].after_attention(
            attended_THE, self._residual[:num_tokens], rows_N
        )
        return self._model.end(x_TD, residual_TD)


class PromptGraphs:
    """All graphs of one runner. They share a memory pool and the buffers of `step`."""

    def __init__(self, step: PromptStep) -> None:
        self._step = step
        self._captured: dict[int, list[Any]] = {}
        self._sizes: list[int] = []

    @property
    def largest(self) -> int:
        """Most tokens of a step; 0 before `capture`."""
        return self._sizes[-1] if self._sizes else 0

    def capture(self, sizes: Sequence[int], progress: Callable[[float], None]) -> None:
        """Make the graphs, largest first: the others then fit into its memory.

        A collective of the ranks that hold the model; nothing else may use the device.
        """
        gc.collect()  # a capture must not meet the destructors of what came before
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for done, size in enumerate(reversed(sizes)):
                # What is compiled, chosen or allocated at the first run must not be captured;
                # the second piece stands for the others, whose layers are alike.
                for index in range(min(len(self._step.layers), 2)):
                    self._step.run_piece(index, size)
                self._captured[size] = [
                    self._capture_piece(index, size, pool)
                    for index in range(len(self._step.layers))
                ]
                progress((done + 1) / len(sizes))
        torch.cuda.current_stream().wait_stream(stream)
        self._sizes = list(sizes)

    def run(
        self, inputs: DeviceInputs, attention: AttentionStep, rows_N: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states as `CausalLM.forward` gives them, of at most `largest` tokens."""
        num_tokens = inputs.metadata.num_tokens
        size = next(size for size in self._sizes if size >= num_tokens)
        self._step.fill(inputs, size)
        graphs = self._captured[size]
        return self._step.run(lambda index: graphs[index].replay(), num_tokens, attention, rows_N)

    def release(self) -> None:
        """Free the graphs; before the groups whose collectives they hold are destroyed."""
        self._captured.clear()
        self._sizes = []

    def _capture_piece(self, index: int, size: int, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may ask the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._step.run_piece(index, size)
        except BaseException:
            # What failed is the cause; that the capture is not valid then is none.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph
