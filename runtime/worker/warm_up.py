"""Steps that run before the first request: one to measure memory, some so that it isn't slow.

All ranks run them together, as real steps are.
"""

import numpy as np
import torch

from vcli.runtime.config import EngineConfig
from vcli.runtime.worker.model_runner import ModelRunner
from vcli.runtime.worker.penalties import TokenHistory
from vcli.runtime.worker.sampler import sample
from vcli.runtime.worker.sampling_columns import SamplingRows

#: longest warm-up prompt on a CPU, where a step of the largest size takes many seconds
_CPU_WARM_UP_TOKENS = 64
#: sizes of batches of decodes that have kernels of their own on a device
_DEVICE_BATCHES = (2, 16, 32, 64, 256)


def profile_step(runner: ModelRunner, config: EngineConfig) -> None:
    """A step of the largest size: as many tokens as may be scheduled, each kind of sampling."""
    limits = config.scheduler
    logits_NV = runner.dummy_step(
        largest_query_lens(
            limits.max_num_batched_tokens, limits.max_num_seqs, config.model.max_model_len
        )
    )
    if logits_NV is not None:
        _sample_all_kinds(logits_NV)


def warm_up(runner: ModelRunner, config: EngineConfig, device: torch.device) -> int:
    """A prompt and a decode step, sampled greedily and by chance; gives the prompt's tokens.

    A device has other kernels for short prompts, and gets one as well.
    """
    num_tokens = min(config.scheduler.max_num_batched_tokens, config.model.max_model_len)
    if device.type == "cpu":
        num_tokens = min(num_tokens, _CPU_WARM_UP_TOKENS)
    for query_lens in ([num_tokens], [1]):
        logits_NV = runner.dummy_step(query_lens)
        if logits_NV is not None:
            _sample_all_kinds(logits_NV)
    if device.type == "cuda":
        runner.dummy_step([min(2, num_tokens)])
        torch.cuda.synchronize(device)
    return num_tokens


def warm_up_batches(runner: ModelRunner, config: EngineConfig, device: torch.device) -> None:
    """Batches of decodes on a device without graphs; capturing these would have run them."""
    if device.type != "cuda":
        return
    most = config.scheduler.max_num_seqs
    # The largest first: its workspace serves the others.
    for num_requests in sorted(
        {min(size, most) for size in (*_DEVICE_BATCHES, most)}, reverse=True
    ):
        runner.dummy_step([1] * num_requests)
    torch.cuda.synchronize(device)


def largest_query_lens(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> list[int]:
    """Lengths of new requests that fill a step: as many requests as allowed, as even as can be."""
    num_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    num_requests = min(max_num_seqs, num_tokens)
    shortest, longer = divmod(num_tokens, num_requests)
    return [shortest + 1] * longer + [shortest] * (num_requests - longer)


def _sample_all_kinds(logits_NV: torch.Tensor) -> None:
    # The numbers of a dummy step mean nothing and may even be no numbers.
    logits_NV = torch.zeros_like(logits_NV)
    num_rows = len(logits_NV)
    for temperature in (0.0, 1.0):
        options = SamplingRows(
            temperature=np.full(num_rows, temperature, dtype=np.float32),
            top_k=np.zeros(num_rows, dtype=np.int32),
            top_p=np.full(num_rows, 0.9 if temperature else 1.0, dtype=np.float32),
            min_p=np.zeros(num_rows, dtype=np.float32),
            repetition_penalty=np.ones(num_rows, dtype=np.float32),
            presence_penalty=np.zeros(num_rows, dtype=np.float32),
            frequency_penalty=np.zeros(num_rows, dtype=np.float32),
            num_logprobs=np.full(num_rows, -1, dtype=np.int32),
            min_tokens=np.zeros(num_rows, dtype=np.int32),
            ending_token_ids=[()] * num_rows,
        )
        history = TokenHistory(
            token_ids=np.zeros((num_rows, 1), dtype=np.int32),
            rows=np.arange(num_rows),
            num_tokens=np.ones(num_rows, dtype=np.int32),
            num_prompt_tokens=np.ones(num_rows, dtype=np.int32),
        )
        sample(
            logits_NV,
            options,
            history,
            draws_N=torch.full((num_rows,), 0.5, dtype=torch.float64),
            names=["warm-up"] * num_rows,
        )
