"""Shapes of well-known models, to measure without their weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vcli.topology.errors import ConfigError

_SHARED: Final[Mapping[str, Any]] = {
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
#: name -> what config.json says
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama8b": {
        **_SHARED,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen06b": {
        **_SHARED,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen30b_moe": {
        **_SHARED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def write_shape(name: str, parent: Path) -> Path:
    """A folder in `parent` with the config.json of the shape `name`, and nothing else.

    Raises:
        ConfigError: there is no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"--shape {name!r} is unknown", hint=f"--shape {', '.join(SHAPES)}")
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder
