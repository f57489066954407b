"""Rows of sampling options, token histories and logits for tests of the sampler."""

import numpy as np
import torch

from vcli.runtime.worker.penalties import TokenHistory
from vcli.runtime.worker.sampling_columns import SamplingColumns

VOCAB = 1000


def rows_of(*params, eos=()):
    columns = SamplingColumns(len(params))
    for row, sampling in enumerate(params):
        columns.set_row(row, sampling, eos, num_generated=0)
    return columns.select(np.arange(len(params)))


def history_of(*requests):
    """Each request: (prompt tokens, generated tokens)."""
    width = max([1, *(len(prompt) + len(generated) for prompt, generated in requests)])
    token_ids = np.zeros((len(requests), width), dtype=np.int32)
    for row, (prompt, generated) in enumerate(requests):
        tokens = [*prompt, *generated]
        token_ids[row, : len(tokens)] = tokens
    return TokenHistory(
        token_ids=token_ids,
        rows=np.arange(len(requests)),
        num_tokens=np.array([len(p) + len(g) for p, g in requests], dtype=np.int32),
        num_prompt_tokens=np.array([len(p) for p, _ in requests], dtype=np.int32),
    )


def random_logits(num_rows, seed=0, spread=3.0, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * spread
