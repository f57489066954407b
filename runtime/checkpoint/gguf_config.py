"""The config.json that a GGUF file's metadata describes, and the names of its tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi
from typing import Any

from vcli.runtime.checkpoint.gguf_file import GgufFile, dequantized_rows
from vcli.runtime.checkpoint.safetensors_file import CheckpointDtype
from vcli.topology.errors import ConfigError

#: tensor of llama.cpp -> tensor of Hugging Face, outside of the layers
MODEL_TENSORS: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: the same for each layer, without `blk.N.` and `model.layers.N.`
LAYER_TENSORS: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
QKV_BIASES: Mapping[str, str] = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
QK_NORMS: Mapping[str, str] = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
ROPE_FACTORS = "rope_freqs.weight"

#: (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings) as published
LLAMA3_ROPE_SCALINGS: Sequence[tuple[float, float, float, int]] = (
    (8.0, 1.0, 4.0, 8192),
    (32.0, 1.0, 4.0, 8192),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """What differs between the architectures that can be converted.

    `has_interleaved_rope`: llama.cpp stores the rows of Q and K in another order than
    Hugging Face (it rotates neighbours, not halves).
    """

    model_type: str
    architecture: str
    has_interleaved_rope: bool
    layer_tensors: Mapping[str, str]


GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(
        model_type="llama",
        architecture="LlamaForCausalLM",
        has_interleaved_rope=True,
        layer_tensors=LAYER_TENSORS,
    ),
    "qwen2": GgufFamily(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        has_interleaved_rope=False,
        layer_tensors={**LAYER_TENSORS, **QKV_BIASES},
    ),
    "qwen3": GgufFamily(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        has_interleaved_rope=False,
        layer_tensors={**LAYER_TENSORS, **QK_NORMS},
    ),
}


def gguf_family(file: GgufFile) -> GgufFamily:
    """The family of `file`.

    Raises:
        ConfigError: an architecture, or a kind of file, that cannot be converted.
    """
    architecture = str(file.metadata.get("general.architecture", "unknown"))
    if architecture not in GGUF_FAMILIES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {architecture!r} cannot be converted",
            hint=f"supported: {', '.join(GGUF_FAMILIES)}; or use its safetensors checkpoint",
        )
    if file.metadata.get(f"{architecture}.expert_count", 0):
        raise ConfigError(
            f"{file.path}: a mixture of experts in GGUF cannot be converted",
            hint="use the safetensors checkpoint of the model",
        )
    if file.metadata.get("split.count", 1) > 1:
        raise ConfigError(
            f"{file.path} is one of {file.metadata['split.count']} parts of a split model",
            hint="join the parts first: llama-gguf-split --merge FIRST_PART OUTPUT",
        )
    return GGUF_FAMILIES[architecture]


def tensor_names(file: GgufFile, family: GgufFamily, num_layers: int) -> dict[str, str]:
    """Hugging Face's name of each tensor -> its name in `file`, in the order of the model.

    Raises:
        ConfigError: a tensor is missing, or one is there that the family does not have.
    """
    names = {ours: theirs for theirs, ours in MODEL_TENSORS.items() if theirs != "output.weight"}
    for layer in range(num_layers):
        for theirs, ours in family.layer_tensors.items():
            names[f"model.layers.{layer}.{ours}"] = f"blk.{layer}.{theirs}"
    missing = [theirs for theirs in names.values() if theirs not in file.tensors]
    if missing:
        raise ConfigError(
            f"{file.path} lacks {len(missing)} tensors of a {family.architecture} with "
            f"{num_layers} layers, first {missing[0]}",
            hint="download or copy the file again",
        )
    if "output.weight" in file.tensors:
        names["lm_head.weight"] = "output.weight"
    _check_head_rows(file, names)
    unknown = sorted(set(file.tensors) - set(names.values()) - {ROPE_FACTORS})
    if unknown:
        raise ConfigError(
            f"{file.path} has {len(unknown)} tensors that a {family.architecture} does not have, "
            f"first {unknown[0]}",
            hint="use the safetensors checkpoint of the model",
        )
    return names


def _check_head_rows(file: GgufFile, names: Mapping[str, str]) -> None:
    """Q and K are cut into heads by the metadata: their rows must be what it says."""
    sizes = _Sizes(file)
    num_heads = sizes.integer("attention.head_count")
    num_kv_heads = sizes.integer("attention.head_count_kv", default=num_heads)
    head_size = sizes.head_size()
    for theirs in names.values():
        for suffix, heads in (("attn_q.weight", num_heads), ("attn_k.weight", num_kv_heads)):
            num_rows = file.tensors[theirs].shape[0]
            if theirs.endswith(suffix) and num_rows != heads * head_size:
                raise ConfigError(
                    f"{file.path}: {theirs} has {num_rows} rows, "
                    f"{heads} heads of {head_size} make {heads * head_size}",
                    hint="the file is damaged or of an unusual kind",
                )


def config_from_gguf(
    file: GgufFile, family: GgufFamily, *, dtype: CheckpointDtype
) -> dict[str, Any]:
    """The config.json of the converted checkpoint."""
    sizes = _Sizes(file)
    hidden_size = sizes.integer("embedding_length")
    num_heads = sizes.integer("attention.head_count")
    head_size = sizes.head_size()
    if sizes.integer("rope.dimension_count", default=head_size) != head_size:
        raise ConfigError(
            f"{file.path}: rotary embedding of {sizes.integer('rope.dimension_count')} of "
            f"{head_size} head dimensions is not supported"
        )
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} has no token_embd.weight", hint="it holds no whole model")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": sizes.integer("feed_forward_length"),
        "num_hidden_layers": sizes.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": sizes.integer("attention.head_count_kv", default=num_heads),
        "head_dim": head_size,
        "max_position_embeddings": sizes.integer("context_length"),
        "rms_norm_eps": sizes.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": sizes.number("rope.freq_base", default=10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
    }
    scaling = _rope_scaling(file, sizes, config)
    if scaling:
        config["rope_scaling"] = scaling
    config.update(special_token_ids(file))
    return config


def special_token_ids(file: GgufFile) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (a list where a turn ends with another token), `pad_...`."""
    ids: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(value, int):
            ids[f"{name}_token_id"] = value
    end_of_turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    if isinstance(end_of_turn, int) and end_of_turn != ids.get("eos_token_id", end_of_turn):
        ids["eos_token_id"] = [ids["eos_token_id"], end_of_turn]
    return ids


class _Sizes:
    """Numbers of the model, named without the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = str(file.metadata["general.architecture"])

    def value(self, name: str) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{name}")

    def integer(self, name: str, *, default: int | None = None) -> int:
        value = self.value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._fault(name, value)
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self.value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._fault(name, value)
        return float(value)

    def head_size(self) -> int:
        heads = self.integer("attention.head_count")
        return self.integer(
            "attention.key_length", default=self.integer("embedding_length") // heads
        )

    def _fault(self, name: str, value: object) -> ConfigError:
        return ConfigError(
            f"{self._file.path}: {self._prefix}.{name} must be a number above 0, got {value!r}",
            hint="the file is damaged or of an unusual kind; use the safetensors checkpoint",
        )


def _rope_scaling(file: GgufFile, sizes: _Sizes, config: Mapping[str, Any]) -> dict[str, Any]:
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope_scaling(file, config)
    kind = sizes.value("rope.scaling.type") or "none"
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{file.path}: rope scaling {kind!r} cannot be converted",
            hint="supported: linear, yarn and llama3; or use the safetensors checkpoint",
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": sizes.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = sizes.integer(
            "rope.scaling.original_context_length", default=config["max_position_embeddings"]
        )
    return scaling


def _llama3_rope_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters behind the factors: llama.cpp keeps only their result, one per frequency."""
    import numpy as np

    stored = np.concatenate(
        [rows.ravel() for rows in dequantized_rows(file, file.tensors[ROPE_FACTORS])]
    )
    head_size = config["head_dim"]
    inverse = config["rope_theta"] ** (-np.arange(0, head_size, 2) / head_size)
    for factor, low, high, original in LLAMA3_ROPE_SCALINGS:
        smooth = (original * inverse / (2 * pi) - low) / (high - low)
        factors = 1 / ((1 - smooth) / factor + smooth)
        factors = np.where(smooth >= 1, 1.0, np.where(smooth <= 0, factor, factors))
        if stored.shape == factors.shape and np.allclose(stored, factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ConfigError(
        f"{file.path}: the factors in {ROPE_FACTORS} are none of the published Llama 3 scalings",
        hint="use the safetensors checkpoint of the model",
    )
