"""Which heads, rows and columns a rank holds: nothing twice, nothing lost, no query astray."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_model import spec_with_heads
from tests.support.weight_files import fill_slices
from vcli.runtime.distributed.virtual import virtual_groups
from vcli.runtime.layers.linear import RowParallelLinear
from vcli.runtime.layers.share import even_share, head_shares
from vcli.topology.errors import ConfigError
from vcli.topology.padding import can_cut_heads, pad_model
from vcli.topology.sizes import ParallelSizes


def padded_shares(num_heads, num_kv_heads, tp):
    spec = pad_model(
        spec_with_heads(num_heads, num_kv_heads), ParallelSizes(tensor_parallel_size=tp)
    )
    return [head_shares(spec, group) for group in virtual_groups("TP", tp)]


def held(share):
    """Heads here in order, None for a zero head."""
    real = range(share.start, share.start + share.count)
    return [*real, *[None] * (share.size - share.count)]


@pytest.mark.parametrize(
    ("heads", "tp", "query", "kv"),
    [
        ((9, 3), 2, [[0, 1, 2, 3, 4, 5], [6, 7, 8, None, None, None]], [[0, 1], [2, None]]),
        ((9, 3), 4, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [None] * 3], [[0], [1], [2], [None]]),
        (
            (9, 3),
            6,
            [[0, 1], [2, None], [3, 4], [5, None], [6, 7], [8, None]],
            [[0], [0], [1], [1], [2], [2]],
        ),
        ((8, 4), 3, [[0, 1, 2, 3], [4, 5, 6, 7], [None] * 4], [[0, 1], [2, 3], [None, None]]),
        ((2, 1), 4, [[0], [1], [None], [None]], [[0], [0], [0], [0]]),
    ],
)
def test_heads_of_each_rank(heads, tp, query, kv):
    shares = padded_shares(*heads, tp)
    assert [held(share.query) for share in shares] == query
    assert [held(share.kv) for share in shares] == kv


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 40))
def test_each_query_head_is_held_once_and_beside_its_own_kv_head(num_kv_heads, per_kv, tp):
    num_heads = num_kv_heads * per_kv
    if not can_cut_heads(spec_with_heads(num_heads, num_kv_heads), tp):
        with pytest.raises(ConfigError, match="would be padded"):
            padded_shares(num_heads, num_kv_heads, tp)
        return
    seen = []
    for share in padded_shares(num_heads, num_kv_heads, tp):
        query, kv = held(share.query), held(share.kv)
        assert len(query) % len(kv) == 0
        group_size = len(query) // len(kv)
        for place, head in enumerate(query):
            if head is not None:
                seen.append(head)
                assert kv[place // group_size] == head // per_kv
    assert seen == list(range(num_heads))


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 3))
def test_even_shares_cover_everything_once_with_zeros_at_the_end(total, tp, extra):
    padded = -(-total // tp) * tp + extra * tp
    shares = [even_share(total, g, "x", padded=padded) for g in virtual_groups("TP", tp)]
    together = [item for share in shares for item in held(share)]
    assert together == [*range(total), *[None] * (padded - total)]


def test_row_parallel_columns_behind_the_last_are_zero():
    group = virtual_groups("TP", 2)[1]
    columns = even_share(5, group, "columns", padded=8)
    layer = RowParallelLinear(columns, 3, group=group, has_bias=False, dtype=torch.float32)
    checkpoint = torch.randn(3, 5)
    fill_slices(layer.weight_slices("o"), {"o.weight": checkpoint})
    assert torch.equal(layer.weight[:, :1], checkpoint[:, 4:])
    assert (layer.weight[:, 1:] == 0).all()
