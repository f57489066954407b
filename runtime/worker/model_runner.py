"""One step on one rank: update the batch, run this rank's layers, hand over, sample.

First pipeline stage: embeds the token ids. Others: take the previous stage's tensors from the
rank with the same TP rank. Last stage: logits, on all its TP ranks, since the vocabulary is split
over them; only the output rank samples. The tokens come back to every rank with the next scheduler
output, or, with `keeps_samples`, the output rank hands them to its TP group at once. It does not
leave the sampling to each of them: float sums on a GPU may differ in the last bit from rank to
rank, and ranks that go on from different tokens give nonsense without an error.

Shapes: T tokens of the step, R requests, N of them that sample, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from vcli.runtime.config import EngineConfig
from vcli.runtime.distributed.collectives import broadcast, recv_tensors, send_tensors
from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.layers.attention import AttentionStep, attention_layers, bind_kv_cache
from vcli.runtime.messages import (
    NOT_SAMPLED,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vcli.runtime.models.decoder import CausalLM
from vcli.runtime.worker.input_batch import InputBatch, IntArray, ScheduledRows
from vcli.runtime.worker.kv_cache import allocate_kv_caches, kv_bytes_per_block
from vcli.runtime.worker.metadata import (
    DeviceInputs,
    StepInputs,
    build_dummy_inputs,
    build_step_inputs,
)
from vcli.runtime.worker.penalties import TokenHistory
from vcli.runtime.worker.replies import PendingResult
from vcli.runtime.worker.sampler import sample
from vcli.runtime.worker.transfer import to_tensor
from vcli.topology.errors import VcliError


class StepOrderError(VcliError):
    """A step was asked for in a state that does not allow it: a bug of ours (exit 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """A step whose logits are there and whose tokens are not."""

    step: ScheduledRows
    logits_NV: torch.Tensor | None
    """None when no request of the step samples, or on a rank without them."""
    keeps_samples: bool


class ModelRunner:
    """Owns the batch and the KV cache of this rank; the model is given, loaded."""

    _has_late_samples: ClassVar[bool] = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: CausalLM,
        context: ParallelContext,
        is_output: bool,
    ) -> None:
        self._config = config
        self.model = model
        self._pp = context.pp
        self._tp = context.tp
        self._device = model.device
        self._dtype = model.dtype
        self._is_output = is_output
        self._layers = attention_layers(model)
        self._block_size = config.cache.block_size
        self._scratch_block = 0
        self._kv_config: KVCacheConfig | None = None
        self._batch: InputBatch | None = None
        self._deferred: SampledStep | None = None
        self._shared_draws = torch.Generator()
        self._shared_draws.manual_seed(config.model.seed)

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block on this rank."""
        return kv_bytes_per_block(self._layers, self._block_size, self._dtype)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate `config.num_blocks` blocks (and the scratch block) and start an empty batch."""
        self._kv_config = config
        self._block_size = config.block_size
        self._bind_kv_cache(config.num_blocks)
        self._batch = InputBatch(
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self._config.model.max_model_len,
            block_size=config.block_size,
            has_late_samples=self._has_late_samples,
        )

    def sleep(self) -> None:
        """Free the KV cache, forget all requests, and move the weights to the CPU."""
        self._release_kv_cache()
        self._batch = None
        self._deferred = None
        if self._device.type == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Move the weights back and allocate the KV cache again, if there was one."""
        if self._device.type == "cuda":
            self.model.to(self._device)
        if self._kv_config is not None and self._batch is None:
            self.initialize_kv_cache(self._kv_config)

    def replace_model(self, model: CausalLM) -> None:
        """Go on with `model`, which has the same layers; the KV cache stays."""
        caches = [layer.kv_cache for layer in self._layers]
        self.model = model
        self._layers = attention_layers(model)
        bind_kv_cache(model, caches)

    def release(self) -> None:
        """Forget the model, the caches and all requests."""
        self._release_kv_cache()
        self._layers = []
        self._batch = None
        self._deferred = None
        del self.model

    def capture_graphs(self, progress: Callable[[float], None]) -> int:
        """Make the CUDA graphs of this runner; gives how many sizes of steps have some."""
        del progress
        return 0

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput | PendingResult | None:
        """Run a step; None where this rank is not the output rank, or when sampling is deferred.

        Raises:
            BatchStateError: the step does not fit what this rank knows.
            StepOrderError: an earlier step was deferred and not sampled, or there is no KV cache.
            LogitsError: the model gave a request no usable logits.
        """
        batch = self._ready_batch(output)
        step = batch.apply(output)
        logits_NV = None
        if step.num_requests:
            inputs = build_step_inputs(batch, step)
            # Every TP rank of the stage takes the same branch: all have the same scheduler output.
            last_tokens = inputs.query_start_loc[1:][step.samples] - 1
            logits_NV = self._forward(inputs, last_tokens)
        if not (self._is_output or output.keeps_samples):
            return None
        sampling = SampledStep(step=step, logits_NV=logits_NV, keeps_samples=output.keeps_samples)
        if output.defer_sampling:
            self._deferred = sampling
            return None
        return self._finish(sampling)

    def _ready_batch(self, output: SchedulerOutput) -> InputBatch:
        """The batch, if it can take `output` now."""
        if self._batch is None:
            raise StepOrderError(
                f"step {output.step} came before the KV cache was made, or in sleep"
            )
        if self._deferred is not None:
            raise StepOrderError(
                f"step {output.step} came before step {self._deferred.step.step} was sampled"
            )
        if output.keeps_samples and self._pp.size > 1:
            raise StepOrderError("a pipeline's first stage does not see what its last one samples")
        return self._batch

    @torch.inference_mode()
    def sample_deferred(self, grammar: object | None) -> ModelRunnerOutput | PendingResult | None:
        """The result of the step that was deferred; None where this rank is not the output rank.

        Raises:
            StepOrderError: no step was deferred, or there is a grammar (none is supported yet).
        """
        if self._deferred is None:
            if not self._is_output:
                return None
            raise StepOrderError("sample_tokens came without a deferred step")
        if grammar is not None:
            raise StepOrderError("grammar masks are not supported")
        deferred, self._deferred = self._deferred, None
        return self._finish(deferred)

    @torch.inference_mode()
    def dummy_step(self, query_lens: list[int]) -> torch.Tensor | None:
        """Run made-up requests of these lengths into the scratch block; nothing is sampled.

        All ranks take part, as in a real step. Logits of the last tokens on the last stage.
        """
        if self._batch is None:
            self._bind_kv_cache(0)
        inputs = build_dummy_inputs(
            query_lens, scratch_block=self._scratch_block, block_size=self._block_size
        )
        return self._forward(inputs, inputs.query_start_loc[1:] - 1)

    def _bind_kv_cache(self, num_blocks: int) -> None:
        # The old caches go first: both may not fit at the same time.
        self._release_kv_cache()
        self._scratch_block = num_blocks
        caches = allocate_kv_caches(
            self._layers,
            num_blocks=num_blocks,
            block_size=self._block_size,
            dtype=self._dtype,
            device=self._device,
        )
        bind_kv_cache(self.model, caches)

    def _release_kv_cache(self) -> None:
        for layer in self._layers:
            layer.kv_cache = torch.empty(0)

    def _forward(self, inputs: StepInputs, last_tokens: IntArray) -> torch.Tensor | None:
        """Logits of `last_tokens` on the last stage; None on others, and when there are none."""
        hidden_ND = self._run_layers(inputs.to_device(self._device), last_tokens)
        if hidden_ND is None:
            return None
        return self.model.compute_logits(hidden_ND)[: len(last_tokens)]

    def _run_layers(self, inputs: DeviceInputs, tokens: IntArray) -> torch.Tensor | None:
        """Hidden states of `tokens`, then padding, on the last stage; others hand theirs on."""
        # Before the tensors of the stage before: kernels that overlap may not follow it at once.
        attention = AttentionStep.planned(self.model.attention_backend, inputs.metadata)
        received = None
        if not self._pp.is_first:
            buffers = self.model.empty_intermediate(inputs.metadata.num_tokens)
            received = recv_tensors(buffers, self._pp)
        rows_N = None
        if (
            self._pp.is_last
            and (rows := self._rows(tokens, inputs.metadata.num_tokens)) is not None
        ):
            rows_N = to_tensor(rows.astype(np.int64), self._device)
        hidden = self._call_model(inputs, attention, received, rows_N)
        if isinstance(hidden, dict):
            send_tensors(hidden, self._pp)
            return None
        return hidden if len(tokens) else None

    def _rows(self, tokens: IntArray, num_tokens: int) -> IntArray | None:
        """The tokens that go through the whole last layer: one at least; None for all of them."""
        if not len(tokens):
            return np.zeros(1, dtype=np.int32)
        return tokens if len(tokens) < num_tokens else None

    def _call_model(
        self,
        inputs: DeviceInputs,
        attention: AttentionStep,
        received: dict[str, torch.Tensor] | None,
        rows_N: torch.Tensor | None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """As `CausalLM.forward`."""
        hidden: torch.Tensor | dict[str, torch.Tensor] = self.model(
            inputs.input_ids_T, inputs.positions_T, attention, received, rows_N
        )
        return hidden

    def _finish(self, sampling: SampledStep) -> ModelRunnerOutput | PendingResult | None:
        step = sampling.step
        result = self._sample(step, sampling.logits_NV) if self._is_output else None
        if sampling.keeps_samples and step.samples.any():
            self._keep_samples(step, result)
        return result

    def _keep_samples(self, step: ScheduledRows, result: ModelRunnerOutput | None) -> None:
        """Give what the output rank sampled to all ranks of its TP group, and note it."""
        assert self._batch is not None
        token_ids = torch.zeros(int(step.samples.sum()), dtype=torch.int64)
        if result is not None:
            sampled = [token_id for token_id in result.token_ids if token_id != NOT_SAMPLED]
            token_ids = torch.tensor(sampled, dtype=torch.int64)
        broadcast(token_ids, self._tp)
        self._batch.keep_samples(step, token_ids.tolist())

    def _sample(self, step: ScheduledRows, logits_NV: torch.Tensor | None) -> ModelRunnerOutput:
        token_ids = [NOT_SAMPLED] * step.num_requests
        if logits_NV is None:
            return ModelRunnerOutput(step=step.step, numbers=step.numbers, token_ids=token_ids)
        batch = self._batch
        assert batch is not None
        places = np.flatnonzero(step.samples).tolist()
        rows = step.rows[step.samples]
        options = batch.sampling.select(rows)
        random_rows = rows[~options.is_greedy]
        sampled = sample(
            logits_NV,
            options,
            TokenHistory(
                token_ids=batch.token_ids,
                rows=rows,
                num_tokens=batch.num_tokens[rows],
                num_prompt_tokens=batch.num_prompt_tokens[rows],
            ),
            draws_N=batch.sampling.draw(random_rows, self._shared_draws)
            if random_rows.size
            else None,
            names=[f"request {step.numbers[place]} in step {step.step}" for place in places],
        )
        for place, token_id in zip(places, sampled.token_ids, strict=True):
            token_ids[place] = token_id
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = dict(zip(places, sampled.logprobs, strict=True))
        return ModelRunnerOutput(
            step=step.step,
            numbers=step.numbers,
            token_ids=token_ids,
            logprobs=None
            if logprobs is None
            else [logprobs.get(place) for place in range(step.num_requests)],
        )
