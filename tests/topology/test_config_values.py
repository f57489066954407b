"""A config.json of any content gives a model or one ConfigError, never another exception."""

from typing import Any

import pytest

from vcli.topology import ConfigError, model_spec_from_config

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
_MOE: dict[str, Any] = {
    **_LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_ANYTHING: tuple[Any, ...] = (
    *(None, True, "x", "", [], ["x"], {}, {"x": []}, -1, 0, 1.5),
    *(float("inf"), float("nan"), 10**20, 10**5000, [10**20], [None], [[0]]),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in _SIZES for value in (10**20, 10**400, "8", 0, -1, True, 2.0)),
        *(("rms_norm_eps", value) for value in ("x", None, [], -1, 0, float("inf"), 10**400, True)),
        ("tie_word_embeddings", "x"),
        ("tie_word_embeddings", 1),
        ("attention_bias", "x"),
        ("mlp_bias", "x"),
        ("norm_topk_prob", "x"),
        ("mlp_only_layers", "x"),
        ("mlp_only_layers", ["x"]),
        ("rope_parameters", "x"),
        ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 10**400}),
        ("rope_theta", "x"),
        ("rope_theta", -1),
        ("eos_token_id", "x"),
        ("eos_token_id", ["x"]),
        ("eos_token_id", True),
        ("eos_token_id", -1),
        ("bos_token_id", "x"),
        ("dtype", 3),
        ("architectures", [["LlamaForCausalLM"]]),
        ("quantization_config", "x"),
        ("head_dim", 7),
        ("num_experts_per_tok", 9),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        model_spec_from_config({**_MOE, name: value}, source="a/config.json")
    assert "a/config.json" in caught.value.message
    assert len(caught.value.message) < 400
    told = {"architectures": "architecture", "rope_scaling": ""}.get(name, name)
    told = told if value != 0 or name != "head_dim" else ""
    assert told in caught.value.message


def test_heads_larger_than_the_model_are_refused() -> None:
    config = {**_LLAMA, "num_attention_heads": 128, "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match="heads of 0 numbers"):
        model_spec_from_config(config, source="config.json")


@pytest.mark.parametrize("base", [_LLAMA, _MOE], ids=["llama", "moe"])
def test_no_value_of_any_key_raises_anything_but_config_error(base: dict[str, Any]) -> None:
    names = {
        *_MOE,
        *("tie_word_embeddings", "attention_bias", "mlp_bias", "dtype", "torch_dtype"),
        *("rope_scaling", "rope_parameters", "rope_theta", "bos_token_id", "eos_token_id"),
        *("hidden_act", "use_sliding_window", "sliding_window", "quantization_config"),
        *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "num_local_experts"),
    }
    refused = 0
    for name in names:
        for value in _ANYTHING:
            try:
                model_spec_from_config({**base, name: value}, source="config.json")
            except ConfigError:
                refused += 1
    assert refused > len(names)


def test_missing_and_null_options_have_their_defaults() -> None:
    spec = model_spec_from_config(
        {**_LLAMA, "rope_scaling": None, "tie_word_embeddings": None, "eos_token_id": None},
        source="config.json",
    )
    assert (spec.rope.theta, spec.rope.kind) == (10000.0, "default")
    assert not spec.tie_word_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (None, ())
    del (plain := dict(_LLAMA))["rms_norm_eps"]
    assert model_spec_from_config(plain, source="config.json").rms_norm_eps == 1e-6


def test_end_tokens_are_one_or_many() -> None:
    one = model_spec_from_config({**_LLAMA, "eos_token_id": 0}, source="config.json")
    two = model_spec_from_config({**_LLAMA, "eos_token_id": [7, 8]}, source="config.json")
    assert (one.eos_token_ids, two.eos_token_ids) == ((0,), (7, 8))
