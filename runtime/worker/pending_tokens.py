"""Tokens that were sampled on a device and are on their way to the host."""

import numpy as np
import torch

from vcli.runtime.messages import NOT_SAMPLED, ModelRunnerOutput
from vcli.runtime.worker.input_batch import ScheduledRows
from vcli.runtime.worker.replies import PendingResult
from vcli.runtime.worker.sampler import LogitsError


class PendingTokens(PendingResult):
    """The tokens of one step; the device goes on meanwhile."""

    def __init__(
        self, step: ScheduledRows, token_ids_N: torch.Tensor, best_N: torch.Tensor
    ) -> None:
        self.step = step
        self._is_cuda = token_ids_N.is_cuda
        self._token_ids = self._to_host(token_ids_N)
        self._best = self._to_host(best_N)
        self._event = None
        if self._is_cuda:
            # Sleeps instead of spinning: the thread that waits shares its core with others.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def resolve(self) -> ModelRunnerOutput:
        """The step's result; waits for the device.

        Raises:
            LogitsError: a row had no usable logits.
        """
        if self._event is not None:
            self._event.synchronize()
        self._check()
        step = self.step
        token_ids = np.full(step.num_requests, NOT_SAMPLED, dtype=np.int64)
        token_ids[step.samples] = self._token_ids.numpy()
        return ModelRunnerOutput(step=step.step, numbers=step.numbers, token_ids=token_ids.tolist())

    def _check(self) -> None:
        is_number = np.isfinite(self._best.numpy())
        if is_number.all():
            return
        numbers = np.asarray(self.step.numbers)[self.step.samples]
        wrong = ", ".join(
            f"request {number} in step {self.step.step}" for number in numbers[~is_number]
        )
        raise LogitsError(
            f"the model gave NaN or infinite logits for {wrong}",
            hint="try --dtype float32 or bfloat16; if that is no different, the weights are "
            "damaged",
        )

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_cuda:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
