"""The safetensors writer against torch and the reference reader; damaged files are named."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vcli.runtime.checkpoint.safetensors_file import (
    bfloat16_bits,
    read_header,
    write_safetensors,
)
from vcli.topology.errors import ConfigError


def _write(path: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tensors = {
        "a": rng.standard_normal((3, 5), dtype=np.float32),
        "b": rng.standard_normal((7,), dtype=np.float32),
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_safetensors(path, shapes, tensors.values(), dtype=dtype)
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_reader_finds_the_written_tensors(tmp_path: Path, dtype: str) -> None:
    tensors = _write(tmp_path / "m.safetensors", dtype)
    loaded = load_file(tmp_path / "m.safetensors")
    assert list(loaded) == ["a", "b"]
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], torch.from_numpy(tensor).to(getattr(torch, dtype)))


def test_bfloat16_is_torchs_cast_bit_by_bit() -> None:
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    is_number = ~np.isnan(values)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    ours = bfloat16_bits(values)
    assert np.array_equal(ours[is_number], expected.view(np.uint16)[is_number])
    nans = torch.from_numpy(ours[~is_number].view(np.int16)).view(torch.bfloat16)
    assert bool(nans.isnan().all())


def test_whole_file_passes(tmp_path: Path) -> None:
    _write(tmp_path / "m.safetensors")
    assert [entry.name for entry in read_header(tmp_path / "m.safetensors")] == ["a", "b"]


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 60, -1, -40])
def test_file_cut_short_is_named(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "m.safetensors"
    _write(path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match="cut short") as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert "again" in caught.value.hint


def test_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match="git-lfs pointer") as caught:
        read_header(path)
    assert caught.value.hint == "git lfs pull"


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b"not json", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a":{"dtype":"F32"}}', "makes no sense"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "4 bytes for shape"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "bytes left over"),
    ],
)
def test_damaged_header_is_told(tmp_path: Path, header: bytes, fault: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ConfigError, match=fault):
        read_header(path)


def test_header_is_padded_to_eight_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    _write(path)
    (header_bytes,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert header_bytes % 8 == 0
    assert json.loads(path.read_bytes()[8 : 8 + header_bytes])["__metadata__"] == {"format": "pt"}
