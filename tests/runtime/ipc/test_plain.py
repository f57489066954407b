"""What crosses nodes without a token: values, never a pickle."""

import pickle

import pytest

from vcli.runtime.ipc.codec import decode, encode
from vcli.runtime.ipc.plain import NotPlainError, from_plain, to_plain
from vcli.runtime.messages import GroupReport, KVCacheConfig, ModelRunnerOutput

GROUP = GroupReport(
    kind="TP", ranks=[0, 1], transport="gloo/tcp", version="2", all_reduce="gloo",
    verified=True, all_reduce_us=1.5, all_reduce_bytes=8,
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -1.5, "text", b"bytes", [1, (2, 3)], (), {"a": [1, {"b": None}]},
        ((KVCacheConfig(num_blocks=7, block_size=16),), {}), [GROUP, GROUP],
        ModelRunnerOutput(step=1, numbers=[4], token_ids=[5]),
        (bytes(100_000), list(range(10_000))),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    sent = to_plain(encode(value))
    assert memoryview(sent[0])[0] != pickle.PROTO[0]
    got = decode(from_plain(sent))
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("value", [pickle.loads, {1: 2}, {3}, object(), [lambda: 1]])
def test_what_needs_a_pickle_is_not_sent(value: object) -> None:
    with pytest.raises(NotPlainError, match="does not cross nodes"):
        to_plain(encode(value))


def test_a_pickle_that_comes_is_not_read() -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return pytest.fail, ("it was unpickled",)

    with pytest.raises(NotPlainError):
        from_plain([pickle.dumps(Bomb(), protocol=5)])
