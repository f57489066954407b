"""Drives a model through a paged cache with a shuffled block table, as a worker would."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vcli.runtime.layers.attention import (
    AttentionStep,
    ForwardMetadata,
    attention_layers,
    bind_kv_cache,
)

BLOCK_SIZE = 4


@dataclass
class PagedSession:
    """Token ids and block tables of some requests, whose blocks are scattered over the cache."""

    num_blocks: int = 64
    seed: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.free = torch.randperm(self.num_blocks, generator=generator).tolist()

    def bind(self, model):
        """Gives the model's layers caches full of NaN: reading a slot never written shows."""
        caches = [
            torch.full(
                (2, self.num_blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_size),
                float("nan"),
                dtype=model.dtype,
            )
            for layer in attention_layers(model)
        ]
        bind_kv_cache(model, caches)

    def step(self, chunks: dict[int, int]):
        """Positions and metadata of a step with so many new tokens for each request."""
        starts = [self.computed.get(number, 0) for number in chunks]
        query_lens = list(chunks.values())
        seq_lens = [start + count for start, count in zip(starts, query_lens, strict=True)]
        for number, seq_len in zip(chunks, seq_lens, strict=True):
            table = self.tables.setdefault(number, [])
            while len(table) * BLOCK_SIZE < seq_len:
                table.append(self.free.pop())
            self.computed[number] = seq_len
        tables = [self.tables[number] for number in chunks]
        width = max(map(len, tables))
        positions = [torch.arange(start, end) for start, end in zip(starts, seq_lens, strict=True)]
        slots = [
            torch.tensor(table)[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for table, position in zip(tables, positions, strict=True)
        ]
        return torch.cat(positions), ForwardMetadata(
            num_tokens=sum(query_lens),
            num_requests=len(chunks),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            slot_mapping=torch.cat(slots),
            block_size=BLOCK_SIZE,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_cpu=query_lens,
            seq_lens_cpu=seq_lens,
        )


def logits_in_chunks(model, session: PagedSession, number: int, token_ids, chunk_sizes):
    """Logits of all tokens of one request, computed in chunks of these sizes."""
    parts, start = [], 0
    for count in chunk_sizes:
        positions, metadata = session.step({number: count})
        attention = AttentionStep.planned(model.attention_backend, metadata)
        hidden = model(token_ids[start : start + count], positions, attention)
        parts.append(model.compute_logits(hidden))
        start += count
    assert start == len(token_ids)
    return torch.cat(parts)


def run_ranks(functions: list[Callable[[], object]]) -> list[object]:
    """Runs one function per rank, each in its thread; raises the first error of any."""
    results: list[object] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = functions[rank]()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
