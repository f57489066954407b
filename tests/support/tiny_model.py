"""Tiny random checkpoints in the real on-disk format, made with transformers as the reference."""

import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vcli.topology.model_spec import model_spec_from_config

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
VOCAB_SIZE = 512
NUM_LAYERS = 4

_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
_OPTIONS = {
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


def reference_config(family: str, **overrides):
    """The transformers config of a tiny model."""
    import transformers

    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **_OPTIONS.get(family, {}),
        **overrides,
    }
    return getattr(transformers, _CLASSES[family][0])(**options)


def reference_model(family: str, *, seed: int = 0, **overrides):
    """A transformers model in float32 whose weights are far from zero and one, biases included."""
    import transformers

    config = reference_config(family, **overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, _CLASSES[family][1])._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("norm.weight") or "layernorm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.2, generator=generator)
    return model.eval()


def write_checkpoint(
    folder: Path, family: str = "llama", *, seed: int = 0, max_shard_size: str = "5GB", **overrides
):
    """Writes config.json and safetensors into `folder`; gives the transformers model."""
    model = reference_model(family, seed=seed, **overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def spec_with_heads(num_heads: int, num_kv_heads: int):
    """The spec of a model with so many heads of 8."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8 * num_heads,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
    }
    return model_spec_from_config(config, source="test")


@cache
def _session_folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="vcli-tiny-model-")


@cache
def tiny_checkpoint(
    family: str = "llama", *, tie_word_embeddings: bool = False, **overrides: int
) -> Path:
    """The folder of a tiny checkpoint, made once per test session and then removed."""
    name = "-".join((family, *(f"{key}-{value}" for key, value in overrides.items())))
    folder = Path(_session_folder().name) / f"{name}-{'tied' if tie_word_embeddings else 'own'}"
    write_checkpoint(folder, family, tie_word_embeddings=tie_word_embeddings, **overrides)
    return folder


@cache
def initial_checkpoint(family: str, dtype: str) -> Path:
    """One as fresh from training code, with heads of 64 and no more digits than `dtype`."""
    shape = {"hidden_size": 128, "head_dim": 64}
    model = reference_model(family, **shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.02 / parameter.std())
    folder = Path(_session_folder().name) / f"{family}-initial-{dtype}"
    model.to(getattr(torch, dtype)).float().save_pretrained(folder)
    return folder
