"""Rotary frequencies and the rotation against transformers'."""

import pytest
import torch

from tests.support.tiny_model import reference_config
from vcli.runtime.layers.rotary import RotaryEmbedding, inverse_frequencies, rotate
from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import RopeSpec, model_spec_from_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
    "yarn-mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn-not-truncated": {**YARN, "truncate": False},
}


def reference_and_ours(parameters, theta=10000.0):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = reference_config("llama", head_dim=32, rope_parameters={**parameters})
    config.rope_parameters["rope_theta"] = theta
    spec = model_spec_from_config(
        config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, source="x"
    )
    ours = RotaryEmbedding(
        spec.rope, head_size=32, max_position_embeddings=spec.max_position_embeddings
    )
    return LlamaRotaryEmbedding(config), ours


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_frequencies_and_amplitude_equal_transformers(kind, theta):
    reference, ours = reference_and_ours(KINDS[kind], theta)
    torch.testing.assert_close(ours.inverse_frequencies, reference.inv_freq, rtol=1e-6, atol=0)
    assert ours.amplitude == pytest.approx(reference.attention_scaling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_heads_equal_transformers(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    reference, ours = reference_and_ours(YARN)
    positions = torch.tensor([0, 1, 2, 300, 7])
    heads = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotated = rotate(heads, *ours.cos_sin(positions, dtype))
    cos, sin = reference(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(
        heads[None].transpose(1, 2), heads[None].transpose(1, 2), cos, sin
    )
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_missing_parameter_of_a_scaling_is_named():
    with pytest.raises(ConfigError, match="'linear' needs 'factor'"):
        inverse_frequencies(RopeSpec(theta=1e4, kind="linear"), 32, 512)
