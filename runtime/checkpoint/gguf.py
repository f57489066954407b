"""From a GGUF file to a safetensors folder, without torch: weights, config, tokenizer."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcli.runtime.checkpoint.gguf_config import (
    config_from_gguf,
    gguf_family,
    special_token_ids,
    tensor_names,
)
from vcli.runtime.checkpoint.gguf_file import GgufFile, dequantized_rows, read_gguf
from vcli.runtime.checkpoint.gguf_tokenizer import tokenizer_config_from_gguf, tokenizer_from_gguf
from vcli.runtime.checkpoint.safetensors_file import (
    DTYPE_BYTES,
    CheckpointDtype,
    write_safetensors,
)
from vcli.topology.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

PROGRESS_INTERVAL_S = 2.0


def convert_gguf(
    path: Path,
    out_dir: Path,
    *,
    dtype: CheckpointDtype = "float32",
    report: Callable[[str], None],
) -> None:
    """Fills `out_dir` with the checkpoint that `path` holds, its weights dequantised to `dtype`.

    Memory stays at a few tens of MiB beside the vocabulary: weights pass by in portions of rows.

    Raises:
        ConfigError: no whole GGUF file of a supported architecture; nothing was written then,
            except where the arithmetic of a quantised type is missing.
    """
    file = read_gguf(path)
    try:
        plan = _plan(file, dtype)
    except ConfigError:
        raise
    # Metadata of the wrong type or range comes up as anything, in `tokenizers` as bare Exception.
    except Exception as error:
        raise ConfigError(
            f"{path} has metadata that cannot be used ({type(error).__name__}: {error})",
            hint="download or copy the file again, or use the safetensors checkpoint",
        ) from error

    out_dir.mkdir(parents=True, exist_ok=True)
    shapes = {ours: file.tensors[theirs].shape for ours, theirs in plan.names.items()}
    chunks = _chunks(file, plan, report=report)
    write_safetensors(out_dir / "model.safetensors", shapes, chunks, dtype=dtype)
    plan.tokenizer.save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", plan.tokenizer_config)
    _write_json(out_dir / "generation_config.json", special_token_ids(file))
    _write_json(out_dir / "config.json", plan.config)


def converted_bytes(file: GgufFile, dtype: CheckpointDtype) -> int:
    """Bytes that the weights of `file` take in `dtype`."""
    return sum(prod(tensor.shape) for tensor in file.tensors.values()) * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConversionPlan:
    """All that the metadata decides; `names` maps Hugging Face's tensor names to the file's."""

    has_interleaved_rope: bool
    config: Mapping[str, Any]
    names: Mapping[str, str]
    tokenizer: "Tokenizer"
    tokenizer_config: Mapping[str, Any]


def _plan(file: GgufFile, dtype: CheckpointDtype) -> _ConversionPlan:
    family = gguf_family(file)
    config = config_from_gguf(file, family, dtype=dtype)
    max_length = config["max_position_embeddings"]
    return _ConversionPlan(
        has_interleaved_rope=family.has_interleaved_rope,
        config=config,
        names=tensor_names(file, family, config["num_hidden_layers"]),
        tokenizer=tokenizer_from_gguf(file),
        tokenizer_config={**tokenizer_config_from_gguf(file), "model_max_length": max_length},
    )


def _chunks(
    file: GgufFile, plan: _ConversionPlan, *, report: Callable[[str], None]
) -> Iterator["npt.NDArray[np.float32]"]:
    next_report_s = time.monotonic() + PROGRESS_INTERVAL_S
    for index, theirs in enumerate(plan.names.values()):
        if time.monotonic() >= next_report_s:
            report(f"converting {file.path.name}: {index} of {len(plan.names)} tensors")
            next_report_s = time.monotonic() + PROGRESS_INTERVAL_S
        tensor = file.tensors[theirs]
        row_order = None
        if plan.has_interleaved_rope and theirs.endswith(("attn_q.weight", "attn_k.weight")):
            is_query = theirs.endswith("attn_q.weight")
            num_heads = plan.config["num_attention_heads" if is_query else "num_key_value_heads"]
            row_order = _half_rotary_rows(num_heads, plan.config["head_dim"])
        yield from dequantized_rows(file, tensor, row_order)


def _half_rotary_rows(num_heads: int, head_size: int) -> "npt.NDArray[np.int64]":
    """For each row of Hugging Face's Q or K, the row of llama.cpp's that holds it.

    llama.cpp puts dimension i beside dimension i + head_size / 2 (it rotates neighbours).
    """
    import numpy as np

    rows = np.arange(num_heads * head_size, dtype=np.int64)
    return rows.reshape(num_heads, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
