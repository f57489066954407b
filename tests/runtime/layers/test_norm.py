"""RMS norm against transformers', with the residual stream."""

import pytest
import torch

from vcli.runtime.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normed_sum_and_residual_equal_transformers(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(7, 48, generator=generator).mul(3).to(dtype) for _ in range(2))
    ours, reference = RMSNorm(48, 1e-5, dtype=dtype), LlamaRMSNorm(48, 1e-5).to(dtype)
    weight = torch.randn(48, generator=generator).to(dtype)
    ours.weight.copy_(weight)
    with torch.no_grad():
        reference.weight.copy_(weight)
        normed, new_residual = ours.add_and_norm(x, residual)
        assert torch.equal(new_residual, x + residual)
        torch.testing.assert_close(normed, reference(x + residual), rtol=1e-6, atol=1e-6)


def test_without_residual_the_input_becomes_it():
    x = torch.randn(3, 8)
    _, residual = RMSNorm(8, 1e-5, dtype=torch.float32).add_and_norm(x, None)
    assert residual is x
