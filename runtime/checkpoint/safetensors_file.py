"""The safetensors file format, without torch: a streaming writer and a check of the header.

8 bytes: header length, little endian | header, JSON, padded with blanks | tensor bytes
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vcli.runtime.checkpoint.regular import check_regular
from vcli.topology.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CheckpointDtype = Literal["float32", "bfloat16"]

DTYPE_NAMES: Mapping[CheckpointDtype, str] = {"float32": "F32", "bfloat16": "BF16"}
DTYPE_BYTES: Mapping[CheckpointDtype, int] = {"float32": 4, "bfloat16": 2}

#: the limit of the reference implementation
MAX_HEADER_BYTES = 100_000_000

BITS_PER_ELEMENT: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of the header; offsets count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin_bytes: int
    end_bytes: int


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    chunks: Iterable["npt.NDArray[np.float32]"],
    *,
    dtype: CheckpointDtype,
) -> None:
    """Writes the tensors of `shapes` in order; `chunks` gives their elements in any portions."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for chunk in chunks:
            file.write((bfloat16_bits(chunk) if dtype == "bfloat16" else chunk).data)
        written_bytes = file.tell() - 8 - len(encoded)
    assert written_bytes == offset, f"{written_bytes} bytes written, the header says {offset}"


def bfloat16_bits(values: "npt.NDArray[np.float32]") -> "npt.NDArray[np.uint16]":
    """`values` rounded to the nearest bfloat16, ties to even, as their 16 bits; NaN stays NaN."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    round_up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + round_up) >> np.uint32(16)).astype(np.uint16)
    # Rounding could carry the payload of a NaN over into the sign.
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors that `path` holds, after a check that all their bytes are there.

    Raises:
        ConfigError: unreadable, cut short, or no safetensors file; names the file.
    """
    try:
        check_regular(path, hint=f"download or copy {path.name} again")
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise _damaged(path, "is a git-lfs pointer, not the weights", hint="git lfs pull")
            if len(start) < 8 or header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
                raise _damaged(
                    path,
                    f"has {file_bytes:,} bytes, its header alone claims {header_bytes:,}: "
                    "it is cut short or no safetensors file",
                )
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise _damaged(path, "has a header that is nested too deeply") from error
    except ValueError as error:
        raise _damaged(path, f"has a header that is not JSON: {error}") from error
    return _entries(path, header, data_bytes=file_bytes - 8 - header_bytes)


def _entries(path: Path, header: object, *, data_bytes: int) -> tuple[TensorEntry, ...]:
    if not isinstance(header, dict):
        raise _damaged(path, "has a header that is not a JSON object")
    entries = tuple(
        _entry(path, name, value) for name, value in header.items() if name != "__metadata__"
    )
    last = max(entries, key=lambda entry: entry.end_bytes, default=None)
    if last is not None and last.end_bytes != data_bytes:
        fault = "is cut short" if last.end_bytes > data_bytes else "has bytes left over"
        raise _damaged(
            path,
            f"{fault}: {last.name} ends at byte {last.end_bytes:,} of the tensor data, "
            f"which has {data_bytes:,}",
        )
    return entries


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    try:
        begin, end = value["data_offsets"]
        entry = TensorEntry(
            name=name,
            dtype=str(value["dtype"]),
            shape=tuple(int(size) for size in value["shape"]),
            begin_bytes=int(begin),
            end_bytes=int(end),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, f"has a header entry that makes no sense: {name}") from error
    bits = BITS_PER_ELEMENT.get(entry.dtype)
    claimed_bytes = entry.end_bytes - entry.begin_bytes
    is_negative = entry.begin_bytes < 0 or claimed_bytes < 0 or any(n < 0 for n in entry.shape)
    if is_negative or (bits and prod(entry.shape) * bits != claimed_bytes * 8):
        raise _damaged(
            path,
            f"gives {name} {claimed_bytes:,} bytes for shape {list(entry.shape)} of {entry.dtype}",
        )
    return entry


def _damaged(path: Path, fault: str, *, hint: str = "") -> ConfigError:
    return ConfigError(f"{path} {fault}", hint=hint or f"download or copy {path.name} again")
