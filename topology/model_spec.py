"""The shape of a model, read from the dict of a Hugging Face `config.json`.

One description for everybody: `topo` counts bytes with it, the layers are built from it.
It knows no tensors and no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vcli.topology.config_values import (
    DAMAGED_HINT,
    finite_number,
    flag,
    optional_mapping,
    positive_number,
    shown,
    size,
    whole_numbers,
)
from vcli.topology.errors import ConfigError

#: architecture name in config.json -> family
SUPPORTED_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

#: what a kind of rotation cannot do without
_ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
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
class CutSizes:
    """The sizes that TP ranks share: the model's own, or larger ones whose rest is zero.

    What is not shared (experts spread whole, an MLP that no layer has) keeps its own size.
    `moe_intermediate_size` is 0 without experts.
    """

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    moe_intermediate_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of the whole, unsharded model. `dtype` is the checkpoint's, as torch names it.

    `padded` is set by the plan where the model's own sizes do not divide by its TP size.
    """

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
    padded: CutSizes | None = None

    @property
    def own_sizes(self) -> CutSizes:
        """What TP ranks would share without padding."""
        return CutSizes(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_size=self.intermediate_size,
            moe_intermediate_size=self.moe.intermediate_size if self.moe else 0,
            vocab_size=self.vocab_size,
        )

    @property
    def cut(self) -> CutSizes:
        """What TP ranks share, as the plan says; the layers are made by these."""
        return self.padded or self.own_sizes

    @property
    def has_dense_mlp(self) -> bool:
        """Whether any layer has an MLP without experts."""
        moe = self.moe
        if moe is not None and moe.decoder_sparse_step == 1 and not moe.mlp_only_layers:
            return False
        return moe is None or not all(moe.is_sparse_layer(i) for i in range(self.num_layers))

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
    hidden_size = size(config, "hidden_size", source)
    heads = _heads(config, hidden_size, source)
    if family == "qwen2":
        qkv_bias, output_bias = True, False
    else:
        bias = flag(config, "attention_bias", source)
        qkv_bias, output_bias = bias, bias
    return ModelSpec(
        architecture=architecture,
        family=family,
        hidden_size=hidden_size,
        intermediate_size=size(config, "intermediate_size", source),
        num_layers=size(config, "num_hidden_layers", source),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        vocab_size=size(config, "vocab_size", source),
        max_position_embeddings=size(config, "max_position_embeddings", source),
        rms_norm_eps=positive_number({"rms_norm_eps": 1e-6, **config}, "rms_norm_eps", source),
        rope=_rope(config, source),
        tie_word_embeddings=flag(config, "tie_word_embeddings", source),
        has_qkv_bias=qkv_bias,
        has_output_bias=output_bias,
        has_mlp_bias=flag(config, "mlp_bias", source),
        has_qk_norm=family in ("qwen3", "qwen3_moe"),
        dtype=_dtype(config, source),
        bos_token_id=next(iter(whole_numbers(config, "bos_token_id", source)), None),
        eos_token_ids=whole_numbers(config, "eos_token_id", source),
        moe=_moe(config, source) if family == "qwen3_moe" else None,
    )


class _Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_size: int


def _heads(config: Mapping[str, Any], hidden_size: int, source: str) -> _Heads:
    num_heads = num_kv_heads = size(config, "num_attention_heads", source)
    if config.get("num_key_value_heads") is not None:
        num_kv_heads = size(config, "num_key_value_heads", source)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}",
            hint=DAMAGED_HINT,
        )
    head_size = hidden_size // num_heads
    if config.get("head_dim") is not None:
        head_size = size(config, "head_dim", source)
    if head_size < 1 or head_size % 2:
        raise ConfigError(
            f"{source}: heads of {head_size} numbers (head_dim, else hidden_size={hidden_size} / "
            f"num_attention_heads={num_heads}) cannot be rotated: it must be even and above 0",
            hint=DAMAGED_HINT,
        )
    return _Heads(num_heads, num_kv_heads, head_size)


def _architecture(config: Mapping[str, Any], source: str) -> str:
    supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(
            f"{source} names no architecture",
            hint=f'set "architectures" in config.json; supported: {supported}',
        )
    for name in names:
        if isinstance(name, str) and name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise ConfigError(
        f"{source}: architecture {shown(names[0])} is not supported", hint=f"supported: {supported}"
    )


def _refuse_unsupported_options(config: Mapping[str, Any], source: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{source}: hidden_act={shown(activation)} is not supported, only 'silu'")
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise ConfigError(
            f"{source}: sliding_window={shown(config['sliding_window'])} is not supported",
            hint='set "use_sliding_window" to false in config.json to attend to the whole context',
        )
    if config.get("quantization_config"):
        options = optional_mapping(config, "quantization_config", source)
        method = options.get("quant_method", "unknown")
        raise ConfigError(
            f"{source}: quantised weights ({shown(method)}) are not supported",
            hint="use the bfloat16 or float16 checkpoint of the model",
        )


def _dtype(config: Mapping[str, Any], source: str) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(dtype, str):
        raise ConfigError(f"{source}: dtype={shown(dtype)} must be a name", hint=DAMAGED_HINT)
    return dtype


def _rope(config: Mapping[str, Any], source: str) -> RopeSpec:
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        merged.update(optional_mapping(config, key, source))
    theta = merged.pop("rope_theta", None)
    if theta is None:
        theta = config.get("rope_theta")
    kind = merged.pop("rope_type", None) or merged.get("type") or "default"
    merged.pop("type", None)
    if kind not in ["default", "linear", "llama3", "yarn"]:
        raise ConfigError(
            f"{source}: rope_type {shown(kind)} is not supported",
            hint="supported: default, linear, llama3, yarn",
        )
    for name in _ROPE_PARAMETERS.get(kind, ()):
        positive_number(merged, name, source)
    numbers = tuple(
        (name, finite_number(merged, name, source))
        for name, value in sorted(merged.items())
        if isinstance(value, int | float)
    )
    known = {"rope_theta": 10000.0 if theta is None else theta}
    return RopeSpec(
        theta=positive_number(known, "rope_theta", source), kind=kind, parameters=numbers
    )


def _moe(config: Mapping[str, Any], source: str) -> MoeSpec:
    # transformers 5 writes the second name.
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    num_experts = size(config, name, source)
    per_token = size(config, "num_experts_per_tok", source)
    if per_token > num_experts:
        raise ConfigError(
            f"{source}: num_experts_per_tok={per_token} is above {name}={num_experts}",
            hint=DAMAGED_HINT,
        )
    return MoeSpec(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=size(config, "moe_intermediate_size", source),
        norm_topk_prob=flag(config, "norm_topk_prob", source),
        decoder_sparse_step=size(config, "decoder_sparse_step", source)
        if "decoder_sparse_step" in config
        else 1,
        mlp_only_layers=whole_numbers(config, "mlp_only_layers", source),
    )
