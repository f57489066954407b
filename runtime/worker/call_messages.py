"""What goes between an executor and its workers: the first buffer of each record, and its kinds.

call   CallHeader,  then the encoded payload of its kind
reply  ReplyHeader, then the encoded result; after a failure only what is handed on all the same
"""

from enum import IntEnum

import msgspec

from vcli.runtime.errors import FailureReport

#: `CallHeader.reply_rank` when every rank replies.
ALL_RANKS = -1


#: A rank that fails in one of these leaves its peers in a collective: nothing works after it.
STEP_METHODS = frozenset({"execute_model", "sample_tokens", "execute_dummy_batch"})


class CallKind(IntEnum):
    """What a call carries. Payload in brackets."""

    EXECUTE_MODEL = 0
    """`execute_model` [SchedulerOutput]: the hot one, typed."""
    METHOD = 1
    """A public method of the worker [(args, kwargs)]."""
    FUNCTION = 2
    """A function of the worker [(function, args, kwargs)]."""
    STOP = 3
    """End the loop [nothing]; there is no reply."""


class CallHeader(msgspec.Struct, frozen=True, array_like=True):
    """A call to all ranks. `reply_rank` alone sends its result; each rank sends its failure."""

    call_id: int
    kind: CallKind
    method: str
    reply_rank: int


class ReplyHeader(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer to the call of this id: its result follows, unless it failed.

    After a failure with `has_output`, the output of a `FailedWithOutput` follows.
    """

    call_id: int
    failure: FailureReport | None = None
    has_output: bool = False


class RankActivity(msgspec.Struct, frozen=True):
    """The call that a rank is in, and for how long; as it was known `age_s` ago."""

    method: str
    seconds: float
    age_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Since the call began, if the rank is still in it."""
        return self.seconds + self.age_s

    def describe(self) -> str:
        """In words."""
        age = f", {self.age_s:.0f} s ago" if self.age_s >= 1 else ""
        return f"in {self.method} for {self.seconds:.1f} s{age}"
