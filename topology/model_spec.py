"""The shape of a model, read from the dict of a Hugging Face `config.json`.

One description for everybody: `topo` counts bytes with it, the layers are built from it.
It knows no tensors and no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vcli.topology.errors import ConfigError

#: architecture name in config.json -> family
SUPPORTED_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding; `kind` is `default`, `linear`, `llama3` or `yarn`."""

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()

    def parameter(self, name: str) -> float | None:
        """The number stored under `name`, or None."""
        return dict(self.parameters).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Experts of a mixture-of-experts model; sizes are per expert."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def is_sparse_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` has experts instead of a dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of the whole, unsharded model. `dtype` is the checkpoint's, as torch names it."""

    architecture: str
    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    moe: MoeSpec | None = None

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.moe is not None


def model_spec_from_config(config: Mapping[str, Any], *, source: str) -> ModelSpec:
    """The shape that `config` (a parsed config.json) describes; `source` names it in errors.

    Raises:
        ConfigError: unsupported architecture or option, or a size that is missing or not a number.
    """
    architecture = _architecture(config, source)
    family = SUPPORTED_ARCHITECTURES[architecture]
    _refuse_unsupported_options(config, source)
    hidden_size = _positive(config, "hidden_size", source)
    num_heads = _positive(config, "num_attention_heads", source)
    if family == "llama":
        bias = bool(config.get("attention_bias", False))
        qkv_bias, output_bias = bias, bias
    elif family == "qwen2":
        qkv_bias, output_bias = True, False
    else:
        bias = bool(config.get("attention_bias", False))
        qkv_bias, output_bias = bias, bias
    num_kv_heads = (
        _positive(config, "num_key_value_heads", source)
        if config.get("num_key_value_heads") is not None
        else num_heads
    )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}",
            hint="the checkpoint's config.json is damaged; download it again",
        )
    head_size = (
        _positive(config, "head_dim", source)
        if config.get("head_dim") is not None
        else hidden_size // num_heads
    )
    return ModelSpec(
        architecture=architecture,
        family=family,
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size", source),
        num_layers=_positive(config, "num_hidden_layers", source),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=_positive(config, "vocab_size", source),
        max_position_embeddings=_positive(config, "max_position_embeddings", source),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, source),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=qkv_bias,
        has_output_bias=output_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_qk_norm=family in ("qwen3", "qwen3_moe"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        bos_token_id=_optional_int(config.get("bos_token_id")),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
        moe=_moe(config, source) if family == "qwen3_moe" else None,
    )


def _architecture(config: Mapping[str, Any], source: str) -> str:
    supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(
            f"{source} names no architecture",
            hint=f'set "architectures" in config.json; supported: {supported}',
        )
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise ConfigError(
        f"{source}: architecture {names[0]!r} is not supported", hint=f"supported: {supported}"
    )


def _refuse_unsupported_options(config: Mapping[str, Any], source: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{source}: hidden_act={activation!r} is not supported, only 'silu'")
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise ConfigError(
            f"{source}: sliding_window={config['sliding_window']} is not supported",
            hint='set "use_sliding_window" to false in config.json to attend to the whole context',
        )
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise ConfigError(
            f"{source}: quantised weights ({method}) are not supported",
            hint="use the bfloat16 or float16 checkpoint of the model",
        )


def _rope(config: Mapping[str, Any], source: str) -> RopeSpec:
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if isinstance(value, Mapping):
            merged.update(value)
    theta = merged.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = str(merged.pop("rope_type", None) or merged.pop("type", None) or "default")
    merged.pop("type", None)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(
            f"{source}: rope_type {kind!r} is not supported",
            hint="supported: default, linear, llama3, yarn",
        )
    numbers = tuple(
        (name, float(value))
        for name, value in sorted(merged.items())
        if isinstance(value, int | float)
    )
    return RopeSpec(theta=float(theta), kind=kind, parameters=numbers)


def _moe(config: Mapping[str, Any], source: str) -> MoeSpec:
    return MoeSpec(
        # transformers 5 writes the second name.
        num_experts=_positive(
            config, "num_experts" if "num_experts" in config else "num_local_experts", source
        ),
        num_experts_per_token=_positive(config, "num_experts_per_tok", source),
        intermediate_size=_positive(config, "moe_intermediate_size", source),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        decoder_sparse_step=_positive(config, "decoder_sparse_step", source)
        if "decoder_sparse_step" in config
        else 1,
        mlp_only_layers=tuple(config.get("mlp_only_layers") or ()),
    )


def _positive(config: Mapping[str, Any], name: str, source: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{source}: {name} must be a whole number above 0, got {value!r}")
    return value


def _optional_int(value: object) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else None


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    return ()
