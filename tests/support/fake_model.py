"""A model whose next token is a function of all tokens before it, and a strict worker around it.

The fake KV cache holds, for each slot, a digest of the whole prefix up to that token. Before a
step computes anything it verifies every row that it would attend to, so a scheduler that hands out
a wrong block, a stale prefix or a wrong count is caught at the step that would go wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from vcli.runtime.messages import (
    OWN_SAMPLE,
    KVCacheConfig,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

VOCAB_SIZE = 1000


def extend_digest(digest: bytes, token_id: int) -> bytes:
    """Digest of a prefix that is one token longer."""
    return blake2b(digest + token_id.to_bytes(4, "little"), digest_size=16).digest()


def next_token(digest: bytes) -> int:
    """What the model samples after the prefix with this digest."""
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def generate_alone(
    prompt: Sequence[int],
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """The tokens that a request gets when nothing else runs."""
    digest = b""
    for token_id in prompt:
        digest = extend_digest(digest, token_id)
    generated: list[int] = []
    while len(generated) < max_tokens:
        token_id = next_token(digest)
        generated.append(token_id)
        if token_id in stop_token_ids and len(generated) >= min_tokens:
            break
        digest = extend_digest(digest, token_id)
    return generated


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    sampled: int = -1
    is_kept: bool = False
    digests: list[bytes] = field(default_factory=list)

    def digest_at(self, position: int) -> bytes:
        """Digest of the tokens up to and including `position`."""
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else b""
            self.digests.append(extend_digest(before, self.token_ids[len(self.digests)]))
        return self.digests[position]


class FakeModelWorker:
    """Applies steps exactly as `messages.py` words them, and refuses everything else."""

    def __init__(
        self,
        kv: KVCacheConfig,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._slots: dict[tuple[int, int], bytes] = {}
        self.rows: dict[int, _Row] = {}
        self.num_computed_tokens = 0

    def execute(self, out: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        self._check_limits(out)
        for number in out.removed:
            assert number in self.rows, f"removed {number} is unknown"
            del self.rows[number]
        batch = [(data.number, self._add(data)) for data in out.new]
        batch += [(number, row) for number, row in self._continue(out)]
        for (number, row), num_tokens in zip(batch, out.num_scheduled_tokens, strict=True):
            self._check_context(number, row, num_tokens)
        token_ids = [
            self._compute(number, row, num_tokens)
            for (number, row), num_tokens in zip(batch, out.num_scheduled_tokens, strict=True)
        ]
        for _, row in batch:
            row.is_kept = out.keeps_samples and row.sampled >= 0
        return ModelRunnerOutput(
            step=out.step, numbers=[number for number, _ in batch], token_ids=token_ids
        )

    def _check_limits(self, out: SchedulerOutput) -> None:
        num_rows = len(out.new) + len(out.running.numbers)
        assert num_rows == len(out.num_scheduled_tokens) > 0
        assert min(out.num_scheduled_tokens) > 0
        if self._max_num_seqs is not None:
            assert num_rows <= self._max_num_seqs
        if self._max_num_batched_tokens is not None:
            assert out.total_num_scheduled_tokens <= self._max_num_batched_tokens

    def _add(self, data: NewRequestData) -> _Row:
        assert data.number not in self.rows, f"new {data.number} is known"
        assert 0 < data.num_prompt_tokens <= len(data.token_ids)
        assert data.num_computed_tokens < len(data.token_ids)
        row = _Row(list(data.token_ids), list(data.block_ids), data.num_computed_tokens)
        self.rows[data.number] = row
        return row

    def _continue(self, out: SchedulerOutput) -> list[tuple[int, _Row]]:
        columns = out.running
        rows = []
        for number, token_id, num_computed, new_block_ids in zip(
            columns.numbers,
            columns.token_ids,
            columns.num_computed_tokens,
            columns.new_block_ids,
            strict=True,
        ):
            row = self.rows[number]
            expected = OWN_SAMPLE if row.is_kept else row.sampled
            assert token_id == expected, f"{number} sampled {row.sampled}, told {token_id}"
            assert num_computed == row.num_computed
            if row.sampled >= 0:
                row.token_ids.append(row.sampled)
            row.sampled, row.is_kept = -1, False
            row.block_ids += new_block_ids
            rows.append((number, row))
        return rows

    def _check_context(self, number: int, row: _Row, num_tokens: int) -> None:
        block_size = self._kv.block_size
        end = row.num_computed + num_tokens
        assert end <= len(row.token_ids), f"{number}: {end} of {len(row.token_ids)} tokens"
        assert end <= len(row.block_ids) * block_size, f"{number}: no slot for token {end}"
        assert len(set(row.block_ids)) == len(row.block_ids)
        assert all(0 <= block_id < self._kv.num_blocks for block_id in row.block_ids)
        for position in range(row.num_computed):
            slot = (row.block_ids[position // block_size], position % block_size)
            assert self._slots.get(slot) == row.digest_at(position), (
                f"{number}: slot {slot} does not hold token {position}"
            )

    def _compute(self, number: int, row: _Row, num_tokens: int) -> int:
        block_size = self._kv.block_size
        end = row.num_computed + num_tokens
        for position in range(row.num_computed, end):
            block_id = row.block_ids[position // block_size]
            for other, other_row in self.rows.items():
                assert other == number or block_id not in other_row.block_ids, (
                    f"{number} writes into block {block_id}, which {other} holds"
                )
            self._slots[block_id, position % block_size] = row.digest_at(position)
        row.num_computed = end
        self.num_computed_tokens += num_tokens
        if end < len(row.token_ids):
            return -1
        row.sampled = next_token(row.digest_at(end - 1))
        return row.sampled
