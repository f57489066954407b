"""The torch back end against attention written out token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_steps import BLOCK_SIZE, PagedSession
from vcli.runtime.layers import attention_torch
from vcli.runtime.layers.attention import Attention, AttentionStep, bind_kv_cache
from vcli.runtime.layers.attention_torch import TorchAttention, group_by_length

HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 16
SCALE = 0.3


class Requests:
    """Random queries, keys and values of a few requests, and the layer that caches them."""

    def __init__(self, dtype=torch.float32):
        self.session = PagedSession(num_blocks=128)
        self.layer = Attention(0, HEADS, KV_HEADS, HEAD_SIZE, SCALE)
        shape = (2, 128, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        bind_kv_cache(self.layer, [torch.full(shape, float("nan"), dtype=dtype)])
        self.backend = TorchAttention()
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)
        self.keys, self.values = {}, {}

    def random(self, count, heads):
        shape = (count, heads, HEAD_SIZE)
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def step(self, chunks):
        """Output of the back end and of the reference for one step."""
        _, metadata = self.session.step(chunks)
        query = self.random(metadata.num_tokens, HEADS)
        key = self.random(metadata.num_tokens, KV_HEADS)
        value = self.random(metadata.num_tokens, KV_HEADS)
        plan = self.backend.plan(metadata)
        step = AttentionStep(backend=self.backend, plan=plan, slot_mapping=metadata.slot_mapping)
        self.layer.write(key, value, metadata.slot_mapping)
        output = self.layer(query, step)
        written = torch.full_like(query, float("nan"))
        assert self.layer(query, step, written) is written
        torch.testing.assert_close(written, output, equal_nan=True)
        expected, start = [], 0
        for number, count in chunks.items():
            rows = slice(start, start + count)
            for cache, new in ((self.keys, key), (self.values, value)):
                old = [cache[number]] if number in cache else []
                cache[number] = torch.cat([*old, new[rows]])
            expected.append(self.reference(query[rows], number))
            start += count
        return output, torch.cat(expected)

    def reference(self, query, number):
        keys, values = self.keys[number].double(), self.values[number].double()
        context, count = len(keys), len(query)
        output = torch.empty_like(query)
        for index in range(count):
            visible = context - count + index + 1
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = keys[:visible, kv_head] @ query[index, head].double() * SCALE
                weights = scores.softmax(0)
                output[index, head] = (weights @ values[:visible, kv_head]).to(query.dtype)
        return output


STEPS = [
    {0: 7},
    {1: 1, 0: 1},
    {0: 5, 2: 13, 1: 1},
    {2: 1, 1: 1, 0: 1},
    {3: 2, 1: 6, 0: 1, 2: 4},
    {3: 1, 2: 1, 1: 1, 0: 1},
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
    ids=["f32", "bf16", "f16"],
)
def test_mixed_steps_equal_the_written_out_attention(dtype, tolerance):
    requests = Requests(dtype)
    for chunks in STEPS:
        output, expected = requests.step(chunks)
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def test_a_long_chunk_with_cached_context_is_right_at_every_tile(monkeypatch):
    monkeypatch.setattr(attention_torch, "QUERY_TILE", 4)
    requests = Requests()
    for chunks in ({0: 6}, {0: 11}, {0: 4}):
        output, expected = requests.step(chunks)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_decodes_in_several_batches_come_back_in_their_order(monkeypatch):
    monkeypatch.setattr(attention_torch, "FREE_PADDING_TOKENS", 1)
    requests = Requests()
    requests.step({0: 30, 1: 2, 2: 15, 3: 29})
    _, metadata = PagedSession().step({0: 1})
    assert len(requests.backend.plan(metadata).decodes) == 1
    output, expected = requests.step({3: 1, 1: 1, 0: 1, 2: 1})
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_nan_in_one_request_stays_in_it():
    requests = Requests()
    requests.step({0: 5, 1: 17})
    poisoned = torch.tensor(requests.session.tables[0])
    requests.layer.kv_cache[:, poisoned] = float("nan")
    output, expected = requests.step({0: 1, 1: 1})
    assert output[0].isnan().all()
    torch.testing.assert_close(output[1:], expected[1:], rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40_000), max_size=40))
def test_groups_hold_each_request_once_and_waste_little(seq_lens):
    groups = group_by_length(range(len(seq_lens)), seq_lens)
    assert sorted(request for group in groups for request in group) == list(range(len(seq_lens)))
    for group in groups:
        lengths = [seq_lens[request] for request in group]
        assert max(lengths) <= max(min(lengths) * 1.5, min(lengths) + 128)
        assert len(group) == 1 or len(group) * max(lengths) <= attention_torch.MAX_BATCH_TOKENS


def test_caches_must_fit_the_layers():
    layer = Attention(0, HEADS, KV_HEADS, HEAD_SIZE, SCALE)
    with pytest.raises(AssertionError):
        bind_kv_cache(layer, [torch.zeros(2, 4, BLOCK_SIZE, KV_HEADS + 1, HEAD_SIZE)])
    with pytest.raises(AssertionError):
        bind_kv_cache(layer, [])
