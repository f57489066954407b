"""Bytes of safetensors files into parameters: several threads, each by its own piece.

    file --preadv--> parameter                               CPU, same type, rows as they are stored
    file --preadv--> buffer --> parameter                    CPU, otherwise
    file --preadv--> pinned buffer --copy on a stream-->     GPU; the next piece is read meanwhile

A piece is some rows of one tensor. Of a tensor that is cut by columns only the columns are read,
row by row, unless they are most of the row. Nothing is mapped: a file that is cut short while it
is read gives an error, where a mapping would end the process.
"""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from vcli.runtime.checkpoint.safetensors_file import TensorEntry
from vcli.runtime.layers.weights import WeightSlice

#: Bytes of one piece, and of each buffer.
PIECE_BYTES: Final = 8 << 20
MAX_THREADS: Final = 8
#: Rows of fewer bytes are not worth a read of their own.
_MIN_ROW_BYTES: Final = 1024
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A slice of a tensor, and where the tensor is."""

    path: Path
    entry: TensorEntry
    weight: WeightSlice


class PieceError(Exception):
    """A piece could not be read; names file and tensor."""

    def __init__(self, path: Path, name: str, reason: str) -> None:
        super().__init__(f"{path}: {name} cannot be read: {reason}")
        self.path = path


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows [start, stop) of what `stored` takes, counted from its first one."""

    stored: StoredWeight
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        weight = self.stored.weight
        return (self.stop - self.start) * (weight.num_elements // weight.lengths[0])


def read_weights(
    stored: Sequence[StoredWeight],
    device: torch.device,
    *,
    on_elements: Callable[[int], None],
    num_threads: int | None = None,
) -> None:
    """Fill the targets of all slices, which lie on `device`; blocks until they are filled.

    `on_elements` hears in this thread how many more are read.

    Raises:
        PieceError: a file cannot be read, or ends before its header says. Targets are half filled.
        OSError: a file cannot be opened.
    """
    for each in stored:
        _clear_padding(each.weight)
    if device.type == "cuda":
        # The streams of the threads must not overtake the zeros.
        torch.cuda.synchronize(device)
    pieces = [piece for each in stored for piece in _pieces(each)]
    # The mode belongs to a thread; parameters made in it can only be written in it.
    is_inference = torch.is_inference_mode_enabled()
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(_DataFile(path)) for path in {s.path for s in stored}}
        lanes = threading.local()

        def read(piece: _Piece) -> int:
            lane = getattr(lanes, "lane", None)
            if lane is None:
                lane = lanes.lane = _GpuLane(device) if device.type == "cuda" else _CpuLane()
            weight = piece.stored.weight
            try:
                with torch.inference_mode(is_inference):
                    lane.read(files[piece.stored.path], piece)
            except OSError as error:
                raise PieceError(piece.stored.path, weight.name, str(error)) from error
            return piece.num_elements

        pool = ThreadPoolExecutor(num_threads or usable_threads(), "weights")
        try:
            for num_elements in pool.map(read, pieces):
                on_elements(num_elements)
        finally:
            pool.shutdown(cancel_futures=True)
            if device.type == "cuda":
                # Buffers are pinned until their last copy is done.
                torch.cuda.synchronize(device)


def usable_threads() -> int:
    """As many as CPUs, and some more, which wait for the disk."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) + 2)


class _DataFile:
    """An open file and where its tensors begin."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "_DataFile":
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._start = 8 + int.from_bytes(os.pread(self._fd, 8, 0), "little")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read_into(self, view: Any, offset: int) -> None:
        """Fill a flat array of bytes from `offset` of the tensor data.

        Raises:
            OSError: the device fails, or the file ends before.
        """
        position, num_bytes = self._start + offset, len(view)
        done = 0
        while done < num_bytes:
            got = os.preadv(self._fd, [view[done:]], position + done)
            if not got:
                raise OSError(f"the file ends at byte {position + done:,}, it is cut short")
            done += got


class _Lane(ABC):
    """What one thread reads through."""

    @abstractmethod
    def read(self, file: _DataFile, piece: _Piece) -> None:
        """Fill the piece's part of its target."""

    @staticmethod
    def _fill(file: _DataFile, piece: _Piece, buffer: Any) -> torch.Tensor:
        """The rows of the piece, in `buffer`; a view of it with the columns that are wanted."""
        rows = _Rows.of(piece)
        for offset, begin, num_bytes in rows.reads():
            file.read_into(buffer[begin : begin + num_bytes], offset)
        held = torch.from_numpy(buffer[: rows.held_bytes]).view(rows.dtype).view(rows.held_shape)
        return held if rows.are_exact else held[(slice(None), *piece.stored.weight.source[1:])]


class _CpuLane(_Lane):
    """Straight into the parameter where its bytes are those of the file."""

    def __init__(self) -> None:
        self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8).numpy()

    def read(self, file: _DataFile, piece: _Piece) -> None:
        """Fill the piece's part of its target."""
        target, rows = _target(piece), _Rows.of(piece)
        if target.dtype == rows.dtype and rows.are_exact and target.is_contiguous():
            self._fill(file, piece, target.view(-1).view(torch.uint8).numpy())
            return
        target.copy_(self._fill(file, piece, _large_enough(self._buffer, rows.held_bytes)))


class _GpuLane(_Lane):
    """Two pinned buffers in turn: one is read into while the other one is copied from."""

    def __init__(self, device: torch.device) -> None:
        # The current device belongs to a thread, and this one is new.
        torch.cuda.set_device(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._copied: list[Any] = [None, None]
        self._turn = 0

    def read(self, file: _DataFile, piece: _Piece) -> None:
        """Read the piece, and begin its copy to the device."""
        self._turn = 1 - self._turn
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        target, rows = _target(piece), _Rows.of(piece)
        pinned = self._buffers[self._turn]
        if rows.held_bytes > PIECE_BYTES:
            pinned = torch.empty(rows.held_bytes, dtype=torch.uint8, pin_memory=True)
        self._fill(file, piece, pinned.numpy())
        held = pinned[: rows.held_bytes].view(rows.dtype).view(rows.held_shape)
        with torch.cuda.stream(self._stream):
            if target.dtype == rows.dtype and rows.are_exact:
                target.copy_(held, non_blocking=True)
            else:
                # Cut and converted there, so that the copy itself waits for nothing.
                there = held.to(self._device, non_blocking=True)
                if not rows.are_exact:
                    there = there[(slice(None), *piece.stored.weight.source[1:])]
                target.copy_(there)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copied[self._turn] = event
        if pinned is not self._buffers[self._turn]:
            event.synchronize()


@dataclass(frozen=True, slots=True)
class _Rows:
    """How the rows of a piece are read: exactly what is wanted, or whole rows to be cut."""

    dtype: torch.dtype
    held_shape: tuple[int, ...]
    are_exact: bool
    first_offset: int
    stride_bytes: int
    """From row to row in the file."""
    row_bytes: int
    """Of a row in the buffer."""

    @classmethod
    def of(cls, piece: _Piece) -> "_Rows":
        weight, entry = piece.stored.weight, piece.stored.entry
        dtype = _DTYPES[entry.dtype]
        inner = weight.lengths[1:]
        stride_bytes = prod(weight.shape[1:]) * dtype.itemsize
        row = weight.source[0].start + piece.start
        offset = entry.begin_bytes + row * stride_bytes
        num_rows = piece.stop - piece.start
        if inner == weight.shape[1:]:
            return cls(dtype, (num_rows, *inner), True, offset, stride_bytes, stride_bytes)
        row_bytes = prod(inner) * dtype.itemsize
        if len(inner) == 1 and row_bytes >= _MIN_ROW_BYTES and 2 * row_bytes <= stride_bytes:
            first = offset + weight.source[1].start * dtype.itemsize
            return cls(dtype, (num_rows, *inner), True, first, stride_bytes, row_bytes)
        held = (num_rows, *weight.shape[1:])
        return cls(dtype, held, False, offset, stride_bytes, stride_bytes)

    @property
    def held_bytes(self) -> int:
        return self.held_shape[0] * self.row_bytes

    def reads(self) -> Iterator[tuple[int, int, int]]:
        """Offset in the tensor data, offset in the buffer, bytes."""
        if self.row_bytes == self.stride_bytes:
            yield self.first_offset, 0, self.held_bytes
            return
        for row in range(self.held_shape[0]):
            yield (
                self.first_offset + row * self.stride_bytes,
                row * self.row_bytes,
                self.row_bytes,
            )


def _pieces(stored: StoredWeight) -> Iterator[_Piece]:
    weight = stored.weight
    if not weight.num_elements:
        return
    num_rows = weight.lengths[0]
    one = _Rows.of(_Piece(stored, 0, 1))
    step = max(1, PIECE_BYTES // one.row_bytes)
    for start in range(0, num_rows, step):
        yield _Piece(stored, start, min(start + step, num_rows))


def _target(piece: _Piece) -> torch.Tensor:
    """The part of the parameter that the piece fills."""
    weight = piece.stored.weight
    inner = tuple(slice(0, length) for length in weight.lengths[1:])
    return weight.target[(slice(piece.start, piece.stop), *inner)]


def _clear_padding(weight: WeightSlice) -> None:
    if weight.lengths != tuple(weight.target.shape):
        weight.target.zero_()


def _large_enough(buffer: Any, num_bytes: int) -> Any:
    if num_bytes <= len(buffer):
        return buffer
    return torch.empty(num_bytes, dtype=torch.uint8).numpy()
