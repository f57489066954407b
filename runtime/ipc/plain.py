"""Plain values as bytes that cannot run code, for connections that anybody may open.

Numbers, texts, bytes, lists, tuples, maps with text keys, and the few structs named here. What
`codec` writes as msgpack is plain already; its pickles are not, and are written anew.
"""

import pickle
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from vcli.runtime.ipc.codec import decode, encode
from vcli.runtime.ipc.layout import Buffer
from vcli.runtime.messages import (
    GroupReport,
    KVCacheConfig,
    MemoryReport,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vcli.topology.errors import VcliError

_PICKLE_TAG: Final = pickle.PROTO[0]
#: No tag of `codec`.
_PLAIN_TAG: Final = b"\x7f"
_STRUCTS: Final[dict[str, type[msgspec.Struct]]] = {
    struct.__name__: struct
    for struct in (GroupReport, KVCacheConfig, MemoryReport, ModelRunnerOutput, SchedulerOutput)
}
_SCALARS: Final = (type(None), bool, int, float, str, bytes)


class NotPlainError(VcliError):
    """A value that only a pickle can carry."""

    def __init__(self, value: object) -> None:
        super().__init__(
            f"a {type(value).__name__} does not cross nodes without a job token",
            hint="give all nodes the same --job-token-file or VCLI_JOB_TOKEN",
        )


def to_plain(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of `codec.encode`, without a pickle. They must come from this host.

    Raises:
        NotPlainError: the value needs one.
    """
    if memoryview(buffers[0])[0] != _PICKLE_TAG:
        return list(buffers)
    value = _lower(decode(buffers))
    return [_PLAIN_TAG + msgspec.msgpack.encode(value)]


def from_plain(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of `codec.encode` again, from what another node sent.

    Raises:
        NotPlainError: it sent a pickle.
    """
    first = memoryview(buffers[0])
    if first[0] == _PLAIN_TAG[0]:
        return list(encode(_raise(msgspec.msgpack.decode(first[1:]))))
    if first[0] == _PICKLE_TAG:
        raise NotPlainError(buffers)
    return list(buffers)


def _lower(value: Any) -> Any:
    """Lists, maps and scalars that say what they were."""
    if type(value) in _SCALARS:
        return value
    if type(value) in (list, tuple):
        return [type(value).__name__, [_lower(item) for item in value]]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _lower(item) for key, item in value.items()}
    if type(value) in _STRUCTS.values():
        return [type(value).__name__, msgspec.to_builtins(value)]
    raise NotPlainError(value)


def _raise(lowered: Any) -> Any:
    if isinstance(lowered, dict):
        return {key: _raise(item) for key, item in lowered.items()}
    if not isinstance(lowered, list):
        return lowered
    kind, content = lowered
    if kind in ("list", "tuple"):
        items = [_raise(item) for item in content]
        return items if kind == "list" else tuple(items)
    return msgspec.convert(content, _STRUCTS[kind])
