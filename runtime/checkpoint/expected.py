"""The tensors that a model of a known family has, to find a wrong checkpoint before a start."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from vcli.runtime.checkpoint.safetensors_file import TensorEntry
from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import ModelSpec, MoeSpec

Shape = tuple[int, ...]

#: types of numbers that weights are loaded from
LOADED_DTYPES: Final = frozenset({"F64", "F32", "F16", "BF16"})
_OTHER_MODEL: Final = "config.json and the weights belong to different models"
_SHOWN_NAMES: Final = 3


def expected_tensors(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each tensor that some rank reads from the checkpoint."""
    hidden = spec.hidden_size
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield from _attention(spec, f"{prefix}.self_attn")
        if spec.moe is not None and spec.moe.is_sparse_layer(layer):
            yield from _experts(spec.moe, hidden, f"{prefix}.mlp")
        else:
            yield from _mlp(hidden, spec.intermediate_size, f"{prefix}.mlp", spec.has_mlp_bias)
    yield "model.norm.weight", (hidden,)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden)


def check_tensors(
    spec: ModelSpec, found: Mapping[str, Sequence[TensorEntry]], folder: Path
) -> None:
    """Whether the files (name -> their tensors) of `folder` hold what the model needs.

    Raises:
        ConfigError: a tensor is missing, has another shape, or numbers that are not loaded.
    """
    entries = {entry.name: (name, entry) for name, held in found.items() for entry in held}
    missing: list[str] = []
    for tensor, shape in expected_tensors(spec):
        if tensor not in entries:
            missing.append(tensor)
            # A damaged config may describe millions of them.
            if len(missing) > len(entries):
                break
            continue
        file_name, entry = entries[tensor]
        _check_tensor(folder / file_name, entry, shape)
    if missing:
        shown = ", ".join(missing[:_SHOWN_NAMES]) + (", ..." if missing[_SHOWN_NAMES:] else "")
        where = folder / next(iter(found)) if len(found) == 1 else f"the {len(found)} weight files"
        inside = "" if len(found) == 1 else f" of {folder}"
        raise ConfigError(
            f"{where}{inside} lack{'s' if len(found) == 1 else ''} {len(missing)} tensors that "
            f"config.json describes: {shown}",
            hint=f"{_OTHER_MODEL}, or a file is missing: download the model again",
        )


def _check_tensor(path: Path, entry: TensorEntry, shape: Shape) -> None:
    if entry.shape != shape:
        raise ConfigError(
            f"{path}: {entry.name} has shape {list(entry.shape)}, config.json describes "
            f"{list(shape)}",
            hint=_OTHER_MODEL,
        )
    if entry.dtype not in LOADED_DTYPES:
        raise ConfigError(
            f"{path}: {entry.name} is stored as {entry.dtype}, which is not loaded",
            hint="quantised weights are not supported; use a bfloat16 or float16 checkpoint",
        )


def _attention(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    query, key = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        yield from _linear(f"{prefix}.{name}", (rows, spec.hidden_size), spec.has_qkv_bias)
    yield from _linear(f"{prefix}.o_proj", (spec.hidden_size, query), spec.has_output_bias)
    if spec.has_qk_norm:
        yield f"{prefix}.q_norm.weight", (spec.head_size,)
        yield f"{prefix}.k_norm.weight", (spec.head_size,)


def _mlp(hidden: int, inner: int, prefix: str, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    for name in ("gate_proj", "up_proj"):
        yield from _linear(f"{prefix}.{name}", (inner, hidden), has_bias)
    yield from _linear(f"{prefix}.down_proj", (hidden, inner), has_bias)


def _experts(moe: MoeSpec, hidden: int, prefix: str) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate.weight", (moe.num_experts, hidden)
    for expert in range(moe.num_experts):
        yield from _mlp(hidden, moe.intermediate_size, f"{prefix}.experts.{expert}", False)


def _linear(prefix: str, shape: Shape, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", shape
    if has_bias:
        yield f"{prefix}.bias", shape[:1]
