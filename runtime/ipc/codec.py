"""Objects to lists of buffers and back. The first byte says how the first buffer is written.

The messages of every step are msgpack of their own type: small, and nothing in them can run code.
Everything else is pickle protocol 5, whose large buffers (arrays, CPU tensors) are buffers of their
own: copied once, into the ring, and not at all into a pickle. Pickle is only ever read from the
memory and the socket pairs of our own processes.

This module never imports torch before someone else did, except to rebuild a tensor that came.
"""

import importlib
import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import msgspec

from vcli.runtime.ipc.layout import Buffer
from vcli.runtime.messages import ModelRunnerOutput, SchedulerOutput
from vcli.topology.errors import VcliError

OUT_OF_BAND_BYTES = 8 << 10
"""Buffers from this size on leave the pickle; below, a buffer of its own costs more."""
_MAX_OUT_OF_BAND = 1024
"""Later ones stay in the pickle, so that the list of lengths stays small."""

_PICKLE_TAG = 0x80
"""How every pickle of protocol 2 and later begins, so it needs no byte of ours."""
_TYPED: dict[int, type] = {1: SchedulerOutput, 2: ModelRunnerOutput}
_TAG_BYTES = {typed: bytes((tag,)) for tag, typed in _TYPED.items()}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    tag: msgspec.msgpack.Decoder(typed) for tag, typed in _TYPED.items()
}
_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
"""Nothing in a tuple of these needs a reducer, which a plain `pickle.dumps` does not have."""
_ENCODER = msgspec.msgpack.Encoder()


class CodecError(VcliError):
    """The buffers are none that `encode` made."""


def encode(obj: object) -> list[Buffer]:
    """The buffers of `obj`; the first one starts with the tag, the others are its large parts.

    Large parts are views of the object's memory: send them before the object changes. Functions
    and classes that the other process cannot import (of `__main__`, local, lambdas) go by value.
    """
    tag = _TAG_BYTES.get(type(obj))
    if tag is not None:
        return [tag + _ENCODER.encode(obj)]
    if type(obj) in _SCALARS or (type(obj) is tuple and _SCALARS.issuperset(map(type, obj))):
        return [pickle.dumps(obj, protocol=5)]
    parts: list[Buffer] = []

    def stays_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES or len(parts) >= _MAX_OUT_OF_BAND:
            return True
        parts.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=stays_in_pickle).dump(obj)
    return [stream.getvalue(), *parts]


def decode(buffers: Sequence[Buffer], *, copy: bool = True) -> Any:
    """The object again.

    With `copy` its large parts are memory of their own and writable (a part that came writable is
    taken over as it is). Without, arrays are read-only views of `buffers`: for a record of a ring
    valid until its release. Tensors never point into read-only memory.

    Raises:
        CodecError: no buffers of `encode`.
    """
    if not buffers or not buffers[0]:
        raise CodecError("an empty message")
    first = memoryview(buffers[0])
    tag = first[0]
    # Pickle comes only from our own processes' memory and socket pairs.
    if tag == _PICKLE_TAG:
        if len(buffers) == 1:
            return pickle.loads(first)  # noqa: S301
        parts: Sequence[Buffer] = buffers[1:]
        if copy:
            parts = [bytearray(part) if memoryview(part).readonly else part for part in parts]
        return pickle.loads(first, buffers=parts)  # noqa: S301
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise CodecError(f"no message has the tag {tag}")
    return decoder.decode(first[1:])


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type):
            return NotImplemented if _is_importable(obj) else _by_value(obj)
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor:
            return _reduce_tensor(torch, obj)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(obj) is numpy.ndarray and not obj.flags.forc:
            # As it is, numpy would copy it into the pickle, and out of it again.
            return numpy.ascontiguousarray(obj).__reduce_ex__(5)
        return NotImplemented


def _is_importable(obj: Any) -> bool:
    module = getattr(obj, "__module__", None)
    if module == "__main__":
        return False
    found: Any = sys.modules.get(module or "")
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _by_value(obj: Any) -> Any:
    import cloudpickle  # type: ignore[import-untyped]

    return pickle.loads, (cloudpickle.dumps(obj, protocol=5),)


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    """A plain CPU tensor as its bytes in row-major order; others by torch's own reduction."""
    is_plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
    )
    if not is_plain:
        return NotImplemented
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.numel() == 0:
        return _rebuild_tensor, (b"", name, tuple(tensor.shape))
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
    return _rebuild_tensor, (data, name, tuple(tensor.shape))


def _rebuild_tensor(data: Buffer, dtype_name: str, shape: tuple[int, ...]) -> Any:
    torch = importlib.import_module("torch")
    dtype = getattr(torch, dtype_name)
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if memoryview(data).readonly:
        data = bytearray(data)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
