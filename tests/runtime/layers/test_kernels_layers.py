"""The Triton kernels of the other layers against plain torch; see `tests.support.kernel_cases`."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernel_cases import (
    BLOCK_SIZE,
    DEVICE,
    DTYPE,
    KERNEL_MARKS,
    NAN,
    assert_near,
    ints,
    randn,
)
from vcli.runtime.layers import activation, norm
from vcli.runtime.layers.kernels import (
    add_rms_norm,
    can_use_skinny,
    prepare_decode,
    rope_and_cache,
    silu_and_mul,
    skinny_linear,
)
from vcli.runtime.layers.kernels.skinny_linear import MatrixTuning, VectorTuning

pytestmark = KERNEL_MARKS


@pytest.mark.parametrize("size", [128, 1000, 4096])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_rounds_as_the_layer_does(size, has_residual):
    layer = norm.RMSNorm(size, 1e-6, dtype=DTYPE, device=DEVICE)
    layer.weight.copy_(randn(size))
    x, residual = randn(5, size), randn(5, size) if has_residual else None
    expected, expected_sum = layer.add_and_norm(x, residual)
    normed, summed = add_rms_norm(x.clone(), residual, layer.weight, 1e-6)
    assert torch.equal(summed, expected_sum)
    # The order of a sum may move a value over the edge of a rounding.
    assert (normed != expected).float().mean() < 0.01
    torch.testing.assert_close(normed, expected, rtol=2**-6, atol=0.0)


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(8, 2, 64), (7, 1, 128), (3, 3, 256)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_turns_queries_and_keys_and_fills_the_cache(heads, kv_heads, head_size, has_norm):
    num_tokens, half = 6, head_size // 2
    qkv = randn(num_tokens, heads + 2 * kv_heads, head_size)
    angles = torch.arange(50)[:, None] * 0.01 ** (torch.arange(half) / half)
    table = torch.cat((angles.cos(), angles.sin()), 1).float().to(DEVICE)
    positions, slots = [0, 7, 49, 3, 4, 5], [5, 17, -1, 40, 0, 31]
    q_norm, k_norm = (randn(head_size), randn(head_size)) if has_norm else (None, None)
    cache = torch.zeros(2, 3, BLOCK_SIZE, kv_heads, head_size, dtype=qkv.dtype, device=DEVICE)
    query = rope_and_cache(
        qkv,
        ints(positions, torch.int64),
        table,
        q_norm,
        k_norm,
        1e-6,
        ints(slots, torch.int64),
        cache,
        heads,
    )
    turned = qkv.double()
    if has_norm:
        turned = turned / (turned.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        turned[:, :heads] *= q_norm.double()
        turned[:, heads : heads + kv_heads] *= k_norm.double()
    cos, sin = table[ints(positions).long()].double()[:, None].chunk(2, -1)
    first, second = turned.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert_near(query, turned[:, :heads])
    expected = torch.zeros_like(cache).double().flatten(1, 2)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot] = turned[token, heads : heads + kv_heads]
            expected[1, slot] = qkv[token, heads + kv_heads :].double()
    assert_near(cache.flatten(1, 2)[0], expected[0])
    assert torch.equal(cache.flatten(1, 2)[1].double(), expected[1])


@pytest.mark.parametrize("size", [48, 1024, 1500])
def test_activation_rounds_as_the_layer_does(size):
    gate_up = randn(3, 2 * size)
    expected = activation.silu_and_mul(gate_up)
    torch.testing.assert_close(silu_and_mul(gate_up), expected, rtol=2**-6, atol=1e-30)


def test_prepare_decode_enters_new_blocks_and_reads_last_tokens():
    num_requests = 70
    tables = ints([[row * 10 + column for column in range(4)] for row in range(80)])
    last_token = torch.arange(80, device=DEVICE) + 1000
    packed = torch.zeros(5, num_requests, dtype=torch.int32)
    packed[0] = torch.randperm(80)[:num_requests]
    packed[1], packed[2], packed[3] = 20, -1, -1
    packed[1:5, 0] = torch.tensor([33, 5, 2, 777])
    packed[1:5, 1] = torch.tensor([32, -1, 2, 778])
    packed[:, 69] = torch.tensor([0, 0, -1, -1, 0])
    expected = tables.clone()
    expected[int(packed[0, 0]), 2], expected[int(packed[0, 1]), 2] = 777, 778
    out = {
        name: torch.full((num_requests,), 99, dtype=dtype, device=DEVICE)
        for name, dtype in (
            ("input_ids_R", torch.int64),
            ("positions_R", torch.int64),
            ("slot_mapping_R", torch.int64),
            ("rows_R", torch.int32),
            ("seq_lens_R", torch.int32),
        )
    }
    prepare_decode(packed.to(DEVICE), tables, last_token, BLOCK_SIZE, **out)
    assert torch.equal(tables, expected)
    rows = packed[0].tolist()
    assert out["input_ids_R"].tolist() == [5, *(1000 + row for row in rows[1:69]), 0]
    assert out["positions_R"].tolist() == [32, 31, *[19] * 67, 0]
    slots = [777 * 16, (rows[1] * 10 + 1) * 16 + 15, *((r * 10 + 1) * 16 + 3 for r in rows[2:69])]
    assert out["slot_mapping_R"].tolist() == [*slots, -1]
    assert out["rows_R"].tolist() == rows
    assert out["seq_lens_R"].tolist() == packed[1].tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 256), (50, 2056), (100, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_skinny_linear_equals_the_plain_one(num_rows, num_outputs, num_inputs, has_bias):
    x, weight = randn(num_rows, num_inputs), randn(num_outputs, num_inputs)
    bias = randn(num_outputs) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = torch.full((num_rows, num_outputs), NAN, dtype=x.dtype, device=DEVICE)
    assert skinny_linear(x, weight, bias, out) is out
    assert_near(out, expected)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("num_inputs", [128, 384, 200])
def test_one_row_is_right_however_far_the_weight_is_read_ahead(ahead, num_inputs):
    x, weight = randn(1, num_inputs), randn(9, num_inputs)
    tuning = VectorTuning(outputs=2, inputs=128, num_warps=1, ahead=ahead)
    assert_near(skinny_linear(x, weight, tuning=tuning), F.linear(x.double(), weight.double()))


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_inputs_split_over_programs_sum_up_again_and_again(num_splits):
    x, weight = randn(5, 1000), randn(150, 1000)
    tuning = MatrixTuning(num_splits=num_splits, num_stages=2)
    for _ in range(3):
        assert_near(skinny_linear(x, weight, tuning=tuning), F.linear(x.double(), weight.double()))


def test_few_rows_of_an_uneven_weight_are_left_to_cublas():
    assert can_use_skinny(1, 4096, 4095)
    assert can_use_skinny(32, 4096, 4096)
    assert not can_use_skinny(32, 4096, 4095)
    assert can_use_skinny(64, 28672, 4096)
    assert not any(can_use_skinny(rows, 4096, 4096) for rows in (33, 64, 1000))
