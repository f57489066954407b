"""Every type that crosses a process border.

    API server  --ClientMessage-->  engine core  --SchedulerOutput-->  workers
    API server  <--CoreMessage---   engine core  <--ModelRunnerOutput-- output rank
    parent      <--ChildMessage--   child (state, failure; at any time, from every process)

A request is a string id for the client and a small number inside the engine, so that a running
request costs a few bytes per step.
"""

from typing import Any, Final

import msgspec

from vcli.runtime.errors import FailureReport
from vcli.runtime.sampling_params import SamplingParams

# ---- API server -> engine core ------------------------------------------------------------


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """A tokenised request whose limits were checked. `eos_token_ids` end it unless ignore_eos."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Forget these requests and give their blocks back; unknown ids are ignored."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Run the core method `method`; answered by a `UtilityReply` with the same id."""

    call_id: int
    method: str
    arguments: list[Any] = []


#: Whose answer is only heard; other calls count from 1.
SIGN_OF_LIFE: Final = UtilityCall(call_id=0, method="ping")


class ShutdownCore(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Stop: with `drain`, first finish what runs (new requests are refused)."""

    drain: bool


ClientMessage = EngineRequest | AbortRequests | UtilityCall | ShutdownCore

# ---- engine core -> API server ------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the sampled token, and the most likely ones."""

    token_id: int
    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request; `finish_reason` is `stop`, `length`, `abort` or `error`.

    `stop_token_id` is the token that ended it, when one did; it is the last of `new_token_ids`.
    `num_cached_tokens` (prompt tokens that the prefix cache gave) comes with the first output.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine after a step. Counters (`..._total`) only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    computed_prompt_tokens_total: int = 0
    prefix_cache_hit_tokens_total: int = 0
    prefix_cache_query_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0


class EngineOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """What one step gave to the requests, and the state after it (None: as it was)."""

    outputs: list[EngineOutput]
    stats: SchedulerStats | None = None


class UtilityReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """Answer to a `UtilityCall`: a msgpack-able value, or an error text."""

    call_id: int
    value: Any = None
    error: str = ""


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The last message of a core that cannot go on; the report names the first cause."""

    report: FailureReport


CoreMessage = EngineOutputs | UtilityReply | EngineFailed

# ---- engine core -> workers ---------------------------------------------------------------


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request that the workers do not know: new, or resumed after a preemption.

    `token_ids` is the prompt, and for a resumed request what it had generated; the first
    `num_computed_tokens` of them are in the KV cache already (prefix hit). `eos_token_ids` are not
    sampled before `min_tokens` are reached (unless ignore_eos: then they end nothing).
    """

    number: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()


NOT_SAMPLED: Final = -1
"""In place of a token: the request sampled none (a prompt chunk)."""

OWN_SAMPLE: Final = -2
"""In place of a token: the one that the worker itself sampled in the request's last step."""


class RunningRequests(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Columns over the requests that the workers know and that run in this step.

    `token_ids[i]` is the token sampled in the last step of the request, `NOT_SAMPLED` when it
    sampled none, or `OWN_SAMPLE` after a step with `keeps_samples`: the scheduler may not know the
    token yet. `new_block_ids[i]` are appended to the request's block table.
    """

    numbers: list[int] = []
    token_ids: list[int] = []
    num_computed_tokens: list[int] = []
    new_block_ids: list[list[int]] = []


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One step. Batch order: `new` first, then `running`; `num_scheduled_tokens` in that order.

    A request samples a token in this step when its computed and scheduled tokens together reach
    all of its tokens. `removed` are finished, aborted or preempted: the workers forget them before
    anything else. With `defer_sampling` the model runs and `execute_model` gives None;
    `sample_tokens` then samples (needed when a grammar mask is computed meanwhile). With
    `keeps_samples` every rank keeps what is sampled, and later steps name it by `OWN_SAMPLE`.
    """

    step: int
    new: list[NewRequestData]
    running: RunningRequests
    num_scheduled_tokens: list[int]
    removed: list[int] = []
    defer_sampling: bool = False
    keeps_samples: bool = False

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(self.num_scheduled_tokens)


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Result of one step, in batch order; -1 where the request sampled nothing."""

    step: int
    numbers: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the KV cache, equal on all ranks."""

    num_blocks: int
    block_size: int


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """A group after its verified start, as one of its ranks saw it.

    `transport` is what moves the data (`gloo/tcp`, `nccl/p2p`, `self`), `version` the library's,
    `all_reduce` the operation in use, `verified` that a checked all-reduce gave the right sums,
    `all_reduce_us` its median time in microseconds for `all_reduce_bytes`.
    """

    kind: str
    ranks: list[int]
    transport: str
    version: str
    all_reduce: str
    verified: bool
    all_reduce_us: float
    all_reduce_bytes: int
    p2p_pairs_verified: int = 0
    note: str = ""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of a rank went, in bytes: planned before the start, and measured.

    Both have the items of `topology.rank_memory.MemoryItems` that are known. `free_bytes` is what
    the device has left now, None on a CPU.
    """

    rank: int
    device: str
    device_uuid: str
    planned: dict[str, int]
    measured: dict[str, int]
    free_bytes: int | None = None


# ---- child -> parent ----------------------------------------------------------------------


class ChildState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """A start-up state that `process` reached `seconds` after it was started.

    States in order: spawned, imported, device, joined, groups, weights, memory, kv, warm-up,
    ready. `fraction` (0-1) is the progress within it, where it has one.
    """

    process: str
    state: str
    seconds: float
    pid: int
    rank: int | None = None
    fraction: float | None = None
    detail: str = ""


class ChildReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The child can be used; `payload` is what its parent needs to know (msgpack-able)."""

    process: str
    seconds: float
    pid: int
    payload: Any = None


class ChildFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """The child failed, in start-up or later; sent once, the process may end after it."""

    report: FailureReport


class ChildSignalled(msgspec.Struct, frozen=True, kw_only=True, tag="signalled"):
    """The child got a signal to stop, and leaves it to its parent."""

    process: str
    pid: int
    signal_name: str
    rank: int | None = None


ChildMessage = ChildState | ChildReady | ChildFailure | ChildSignalled
