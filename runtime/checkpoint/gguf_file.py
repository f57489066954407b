"""Reading a GGUF file: metadata, tensor table, and the raw bytes of a tensor by rows.

The `gguf` package's own reader takes 3 s for the vocabulary of a small model and answers a damaged
file with whatever numpy raises; this one takes a tenth of that and says what is wrong. The
arithmetic of the quantised types is left to the package (`dequantized_rows`).
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcli.runtime.checkpoint.regular import check_regular
from vcli.topology.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_TENSOR_DIMS = 4
#: float32 bytes that one portion of a tensor takes while it is converted
CHUNK_BYTES = 16 << 20

# GGUF's numbers of value types -> struct codes
SCALAR_CODES: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING_TYPE = 8
ARRAY_TYPE = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """`shape` is row-major, as torch has it (the file stores it reversed); offset from byte 0."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Header of a GGUF file whose tensors all lie inside the file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The header of `path`.

    Raises:
        ConfigError: unreadable, no GGUF file, a version or byte order not supported, cut short.
    """
    try:
        check_regular(path, hint="name a .gguf file or a folder of safetensors")
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            _check_start(path, start)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="check the path and its permissions"
        ) from error
    except (struct.error, EOFError) as error:
        raise _cut_short(path, f"its {file_bytes:,} bytes end inside the header") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} has a damaged GGUF header: {error}", hint="download or copy the file again"
        ) from error


def dequantized_rows(
    file: GgufFile, tensor: GgufTensor, row_order: "npt.NDArray[np.int64] | None" = None
) -> Iterator["npt.NDArray[np.float32]"]:
    """The elements of `tensor` in float32, in portions of whole rows, optionally reordered.

    Raises:
        ConfigError: the `gguf` package has no arithmetic for its type.
    """
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    num_rows = prod(tensor.shape[:-1])
    raw = np.memmap(
        file.path, dtype=np.uint8, mode="r", offset=tensor.offset_bytes, shape=(tensor.num_bytes,)
    ).reshape(num_rows, -1)
    ggml_type = GGMLQuantizationType(tensor.ggml_type)
    step = max(1, CHUNK_BYTES // (4 * tensor.shape[-1]))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        chosen = raw[rows] if row_order is None else raw[row_order[rows]]
        try:
            yield np.ascontiguousarray(dequantize(np.ascontiguousarray(chosen), ggml_type))
        except NotImplementedError as error:
            raise ConfigError(
                f"{file.path}: tensor {tensor.name} has the type {ggml_type.name}, "
                "which cannot be converted",
                hint="use the F16, BF16, Q8_0 or Q4_K variant of the model",
            ) from error


def _check_start(path: Path, start: bytes) -> None:
    if not start.startswith(MAGIC):
        pointer = start.startswith(b"version ")
        raise ConfigError(
            f"{path} is {'a git-lfs pointer' if pointer else 'no GGUF file'} "
            f"(it starts with {start[:4]!r}, not b'GGUF')",
            hint="git lfs pull" if pointer else "name a .gguf file or a folder of safetensors",
        )
    if len(start) < 8:
        raise _cut_short(path, "it ends after the first bytes")
    (version,) = struct.unpack_from("<I", start, 4)
    if version not in SUPPORTED_VERSIONS:
        big_endian = version & 0xFFFF == 0
        raise ConfigError(
            f"{path} is {'big-endian' if big_endian else f'GGUF version {version}'}, "
            "only little-endian versions 2 and 3 are supported",
            hint="convert the model again with a current llama.cpp",
        )


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data)
    cursor.position = 8
    num_tensors, num_values = cursor.unpack("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("I")[0])
    table = [_tensor_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, ggml_type, offset in table:
        num_bytes = _tensor_bytes(name, shape, ggml_type)
        if data_start + offset + num_bytes > len(data):
            missing = data_start + offset + num_bytes - len(data)
            raise _cut_short(path, f"{len(data):,} bytes, {name} needs {missing:,} more")
        tensors[name] = GgufTensor(
            name=name,
            shape=shape,
            ggml_type=ggml_type,
            offset_bytes=data_start + offset,
            num_bytes=num_bytes,
        )
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _tensor_row(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (num_dims,) = cursor.unpack("I")
    if not 1 <= num_dims <= MAX_TENSOR_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
    dims = cursor.unpack(f"{num_dims}Q")
    ggml_type, offset = cursor.unpack("IQ")
    return name, tuple(reversed(dims)), ggml_type, offset


def _tensor_bytes(name: str, shape: tuple[int, ...], ggml_type: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    if ggml_type not in sizes:
        known = max(int(kind) for kind in GGMLQuantizationType)
        raise ValueError(f"tensor {name!r} has the unknown type {ggml_type} (known up to {known})")
    block_elements, block_bytes = sizes[ggml_type]
    if 0 in shape or shape[-1] % block_elements:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}, blocks of {block_elements}")
    return int(prod(shape) // block_elements * block_bytes)


def _cut_short(path: Path, fault: str) -> ConfigError:
    return ConfigError(f"{path} is cut short: {fault}", hint="download or copy the file again")


class _Cursor:
    """A place in the header; raises struct.error or EOFError at the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def unpack(self, codes: str) -> tuple[Any, ...]:
        layout = "<" + codes
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (num_bytes,) = self.unpack("Q")
        self._require(num_bytes)
        raw = self._data[self.position : self.position + num_bytes]
        self.position += num_bytes
        return raw.decode()

    def value(self, kind: int) -> Any:
        if kind in SCALAR_CODES:
            return self.unpack(SCALAR_CODES[kind])[0]
        if kind == STRING_TYPE:
            return self.string()
        if kind != ARRAY_TYPE:
            raise ValueError(f"value type {kind} at byte {self.position:,} is unknown")
        item_kind, length = self.unpack("IQ")
        if item_kind == ARRAY_TYPE:
            raise ValueError(f"nested array at byte {self.position:,}")
        # An item takes a byte at least: a wild length must not become an allocation.
        self._require(length)
        if item_kind in SCALAR_CODES:
            return list(self.unpack(f"{length}{SCALAR_CODES[item_kind]}"))
        return [self.value(item_kind) for _ in range(length)]

    def _require(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.position:
            raise EOFError
