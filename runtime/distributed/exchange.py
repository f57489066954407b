"""Bytes between the ranks of a group, over its CPU channel: small ones in one message.

What the bytes mean is up to the caller; nothing here is unpickled.
"""

import torch

from vcli.runtime.distributed.collectives import all_gather, broadcast
from vcli.runtime.distributed.group import GroupHandle

_FIRST_BYTES = 4096
_LENGTH_BYTES = 8


def broadcast_bytes(data: bytes, group: GroupHandle, *, src_rank_in_group: int) -> bytes:
    """The bytes of the source rank, on every rank; the others' `data` is not looked at."""
    if group.size == 1:
        return data
    first = _first_part(data)
    broadcast(first, group, src_rank_in_group=src_rank_in_group)
    length = _length_of(first)
    if length <= _FIRST_BYTES - _LENGTH_BYTES:
        return _bytes_of(first[_LENGTH_BYTES : _LENGTH_BYTES + length])
    whole = torch.zeros(length, dtype=torch.uint8)
    if group.rank_in_group == src_rank_in_group:
        whole = _tensor_of(data)
    broadcast(whole, group, src_rank_in_group=src_rank_in_group)
    return _bytes_of(whole)


def gather_bytes(data: bytes, group: GroupHandle) -> list[bytes]:
    """The bytes of all ranks in rank order, on every rank."""
    if group.size == 1:
        return [data]
    firsts = all_gather(_first_part(data), group, 0).reshape(group.size, _FIRST_BYTES)
    lengths = [_length_of(first) for first in firsts]
    longest = max(lengths)
    if longest <= _FIRST_BYTES - _LENGTH_BYTES:
        parts = firsts[:, _LENGTH_BYTES:]
    else:
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _tensor_of(data)
        parts = all_gather(padded, group, 0).reshape(group.size, longest)
    return [_bytes_of(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def _first_part(data: bytes) -> torch.Tensor:
    part = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _FIRST_BYTES - _LENGTH_BYTES]
    return _tensor_of(part.ljust(_FIRST_BYTES, b"\0"))


def _length_of(first: torch.Tensor) -> int:
    return int.from_bytes(_bytes_of(first[:_LENGTH_BYTES]), "little")


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
