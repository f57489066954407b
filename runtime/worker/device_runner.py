"""Steps on a GPU: what was sampled stays there, and the host learns of it while the next step runs.

A step of decodes is a CUDA graph where there is one, one with prompts many; others are launched
kernel by kernel. Either way the host waits for nothing: `execute` gives a `PendingTokens`, which
another thread resolves.
Only rows with special sampling (penalties, top-k and top-p, log-probabilities, own seeds) are
sampled as on a CPU, and waited for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vcli.runtime.config import EngineConfig
from vcli.runtime.distributed.collectives import broadcast
from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.layers.attention import AttentionStep
from vcli.runtime.messages import NOT_SAMPLED, KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from vcli.runtime.models.decoder import CausalLM
from vcli.runtime.worker.decode_graphs import DecodeGraphs, DecodeStep
from vcli.runtime.worker.device_batch import DeviceBatch, decode_columns, fits_decode_columns
from vcli.runtime.worker.device_sampler import DeviceSampler
from vcli.runtime.worker.input_batch import InputBatch, IntArray, ScheduledRows
from vcli.runtime.worker.metadata import DeviceInputs, build_step_inputs
from vcli.runtime.worker.model_runner import ModelRunner, SampledStep
from vcli.runtime.worker.pending_tokens import PendingTokens
from vcli.runtime.worker.prompt_graphs import PromptGraphs, PromptStep
from vcli.runtime.worker.replies import PendingResult
from vcli.runtime.worker.step_ops import StepOps
from vcli.runtime.worker.transfer import to_tensor
from vcli.topology.graph_sizes import graph_sizes, prompt_graph_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalLogits(SampledStep):
    """`logits_NV` are those of this rank's part of the vocabulary, in the model's dtype."""

    sampled: tuple[torch.Tensor, torch.Tensor] | None = None
    """Tokens and best numbers (N,) that a graph has picked already."""


class DeviceModelRunner(ModelRunner):
    """A `ModelRunner` whose batch lives on the device."""

    _has_late_samples: ClassVar[bool] = True

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: CausalLM,
        context: ParallelContext,
        is_output: bool,
        ops: StepOps,
    ) -> None:
        super().__init__(config, model=model, context=context, is_output=is_output)
        self._ops = ops
        self._sampler = None
        if model.lm_head is not None:
            self._sampler = DeviceSampler(model.lm_head, context.tp, ops, seed=config.model.seed)
        self._on_device: DeviceBatch | None = None
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._had_graphs = False

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the blocks and start an empty batch; graphs are made by `capture_graphs`."""
        self._release_graphs()
        super().initialize_kv_cache(config)
        limits = self._config
        self._on_device = DeviceBatch(
            max_num_seqs=limits.scheduler.max_num_seqs,
            max_blocks=-(-limits.model.max_model_len // config.block_size),
            scratch_block=self._scratch_block,
            device=self._device,
        )

    @torch.inference_mode()
    def capture_graphs(self, progress: Callable[[float], None]) -> int:
        """Make the graphs; gives how many sizes of steps have some. A collective of all ranks."""
        on_device, sampler = self._on_device, self._sampler
        if (
            self._config.enforce_eager
            or self._pp.size > 1
            or not self.model.attention_backend.has_graphs
            or not self.model.can_capture
            or on_device is None
            or sampler is None
        ):
            return 0
        sizes = graph_sizes(self._config.scheduler.max_num_seqs)
        step = DecodeStep(
            self.model,
            on_device,
            sampler,
            self._ops,
            block_size=self._block_size,
            max_num_requests=sizes[-1],
            max_seq_len=self._config.model.max_model_len,
        )
        prompts = self._prompt_sizes()
        part = len(sizes) / (len(sizes) + len(prompts))
        self._graphs = DecodeGraphs(self.model, step, on_device.scratch_row)
        self._graphs.capture(sizes, lambda done: progress(done * part))
        if prompts:
            self._prompt_graphs = PromptGraphs(self._prompt_step(prompts[-1]))
            self._prompt_graphs.capture(prompts, lambda done: progress(part + done * (1 - part)))
        self._had_graphs = True
        return len(sizes) + len(prompts)

    def _prompt_sizes(self) -> list[int]:
        limits = self._config
        return prompt_graph_sizes(
            limits.model.spec, limits.plan.config, limits.scheduler.max_num_batched_tokens
        )

    def _prompt_step(self, max_num_tokens: int) -> PromptStep:
        return PromptStep(
            self.model,
            max_num_tokens=max_num_tokens,
            scratch_slot=self._scratch_block * self._block_size,
        )

    def sleep(self) -> None:
        """As the base; graphs hold addresses of what goes away."""
        self._release_graphs()
        super().sleep()

    def wake_up(self) -> None:
        """As the base, with new graphs where there were some."""
        super().wake_up()
        if self._had_graphs and self._graphs is None:
            self.capture_graphs(lambda fraction: None)

    def replace_model(self, model: CausalLM) -> None:
        """Not for a device: weights are written in place there."""
        raise NotImplementedError("a device's model is reloaded in place")

    def release(self) -> None:
        """Forget everything; graphs first, they may hold collectives."""
        self._release_graphs()
        self._on_device = None
        super().release()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput | PendingResult | None:
        """Launch a step; see `ModelRunner.execute`."""
        batch = self._ready_batch(output)
        step = batch.apply(output)
        on_device = self._on_device
        assert on_device is not None
        graphs = self._graphs
        sampling: _LocalLogits
        if (
            graphs is not None
            and 0 < step.num_requests <= graphs.largest
            and fits_decode_columns(batch, step)
        ):
            sampling = self._replay(graphs, batch, step, output)
        else:
            on_device.apply(batch, new_blocks=batch.new_blocks)
            sampling = self._launch(on_device, batch, step, output)
        if self._sampler is None:
            return None
        if output.defer_sampling:
            self._deferred = sampling
            return None
        return self._finish(sampling)

    def _replay(
        self, graphs: DecodeGraphs, batch: InputBatch, step: ScheduledRows, output: SchedulerOutput
    ) -> _LocalLogits:
        done = graphs.replay(
            step.num_requests,
            lambda columns: decode_columns(batch, step, columns),
            batch.block_table,
        )
        count = step.num_requests
        logits, token_ids, best = (
            tensor[:count] for tensor in (done.local_logits, done.token_ids, done.best)
        )
        if not step.samples.all():
            chosen = to_tensor(np.flatnonzero(step.samples), self._device)
            logits, token_ids, best = (
                tensor.index_select(0, chosen) for tensor in (logits, token_ids, best)
            )
        return _LocalLogits(
            step=step,
            logits_NV=logits,
            keeps_samples=output.keeps_samples,
            sampled=(token_ids, best),
        )

    def _launch(
        self,
        on_device: DeviceBatch,
        batch: InputBatch,
        step: ScheduledRows,
        output: SchedulerOutput,
    ) -> _LocalLogits:
        logits = None
        if step.num_requests:
            inputs = build_step_inputs(batch, step)
            last_tokens = inputs.query_start_loc[1:] - 1
            tensors = inputs.to_device(self._device)
            self._insert_own_tokens(on_device, step, tensors, last_tokens)
            hidden = self._run_layers(tensors, last_tokens[step.samples])
            if hidden is not None:
                out = None if self._graphs is None else self._graphs.logits(len(hidden))
                logits = self.model.compute_local_logits(hidden, out)
                logits = logits[: int(step.samples.sum())]
        return _LocalLogits(step=step, logits_NV=logits, keeps_samples=output.keeps_samples)

    def _rows(self, tokens: IntArray, num_tokens: int) -> IntArray | None:
        """As the base, padded to what the decode graphs have tried.

        A product of another number of rows may need a kernel that the driver has not loaded yet,
        and loading waits for the device.
        """
        if self._graphs is None or not 0 < len(tokens) <= self._graphs.largest:
            return super()._rows(tokens, num_tokens)
        padding = self._graphs.size_for(len(tokens)) - len(tokens)
        return np.pad(tokens, (0, padding), mode="edge")

    def _call_model(
        self,
        inputs: DeviceInputs,
        attention: AttentionStep,
        received: dict[str, torch.Tensor] | None,
        rows_N: torch.Tensor | None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        graphs = self._prompt_graphs
        if graphs is None or inputs.metadata.num_tokens > graphs.largest:
            return super()._call_model(inputs, attention, received, rows_N)
        return graphs.run(inputs, attention, rows_N)

    def _insert_own_tokens(
        self,
        on_device: DeviceBatch,
        step: ScheduledRows,
        inputs: DeviceInputs,
        last_tokens: npt.NDArray[np.int32],
    ) -> None:
        """The tokens that the host may not know yet, from the device."""
        if not step.is_own.any():
            return
        places = to_tensor(last_tokens[step.is_own].astype(np.int64), self._device)
        rows = to_tensor(step.rows[step.is_own].astype(np.int64), self._device)
        inputs.input_ids_T.index_copy_(0, places, on_device.last_token.index_select(0, rows))

    def _finish(self, sampling: SampledStep) -> ModelRunnerOutput | PendingResult | None:
        assert isinstance(sampling, _LocalLogits)
        step, batch = sampling.step, self._batch
        assert batch is not None
        if sampling.logits_NV is None:
            if not self._is_output:
                return None
            token_ids = [NOT_SAMPLED] * step.num_requests
            return ModelRunnerOutput(step=step.step, numbers=step.numbers, token_ids=token_ids)
        if not batch.sampling.are_plain(step.rows[step.samples]):
            return self._sample_specially(sampling, sampling.logits_NV)
        token_ids_N, best_N = sampling.sampled or self._sample_on_device(step, sampling.logits_NV)
        if not self._is_output:
            return None
        return PendingTokens(step, token_ids_N, best_N)

    def _sample_on_device(
        self, step: ScheduledRows, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._sampler is not None
        assert self._on_device is not None
        rows = to_tensor(step.rows[step.samples].astype(np.int64), self._device)
        temperature = self._on_device.temperature.index_select(0, rows)
        token_ids, best = self._sampler.sample(logits, temperature)
        self._on_device.last_token.index_copy_(0, rows, token_ids)
        return token_ids, best

    def _sample_specially(
        self, sampling: _LocalLogits, local_logits: torch.Tensor
    ) -> ModelRunnerOutput | None:
        """Sample as on a CPU, with everything that rows may ask for; waits for the device."""
        head = self.model.lm_head
        assert head is not None
        logits = head.whole_logits(local_logits)
        result = None
        if self._is_output:
            result = self._sample(sampling.step, logits)
        if sampling.keeps_samples or self._is_output:
            self._keep_samples_on_device(sampling, result)
        return result

    def _keep_samples_on_device(
        self, sampling: _LocalLogits, result: ModelRunnerOutput | None
    ) -> None:
        assert self._on_device is not None
        assert self._batch is not None
        step = sampling.step
        token_ids = torch.zeros(int(step.samples.sum()), dtype=torch.int64)
        if result is not None:
            token_ids = torch.tensor([i for i in result.token_ids if i != NOT_SAMPLED])
            # Only special rows are asked for their earlier tokens, and they are all sampled here.
            self._batch.fill_samples(step, token_ids.numpy())
        if sampling.keeps_samples:
            broadcast(token_ids, self._tp)
        rows = to_tensor(step.rows[step.samples].astype(np.int64), self._device)
        self._on_device.last_token.index_copy_(0, rows, token_ids.to(self._device))

    def _release_graphs(self) -> None:
        if self._graphs is not None:
            torch.cuda.synchronize(self._device)
            self._graphs.release()
            self._graphs = None
        if self._prompt_graphs is not None:
            self._prompt_graphs.release()
            self._prompt_graphs = None
