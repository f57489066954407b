"""Who computes how many tokens in the next step, and what a step's result means for each request.

Continuous batching: a step takes every running request first (one token each, or the next chunk of
a prompt), then admits waiting ones in the order of their arrival while the token budget and the
blocks last. When a running request finds no block, the one that arrived last gives all of its own
back and is computed again later.

Steps may overlap: `schedule()` counts tokens as computed at once and as in flight until
`update_from_output()`. A request whose next token is still in flight is left out, or, where the
workers keep what they sample, goes on with it unseen: should that token end the request, the
further ones in flight are dropped when they come.

Order that holds at all times: everything that runs arrived before everything that waits.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from vcli.runtime.config import CacheConfig, SchedulerConfig
from vcli.runtime.core.kv_cache_manager import KVCacheManager
from vcli.runtime.core.request import FinishReason, Request, RequestStatus, verify_request
from vcli.runtime.core.step_builder import StepBuilder
from vcli.runtime.errors import RequestError
from vcli.runtime.messages import (
    EngineOutput,
    EngineRequest,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)

_HEADROOM_FRACTION = 100
"""While something runs, 1/100 of the blocks is kept from new requests: it will grow."""


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """All requests of one engine core, and the blocks they hold. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv: KVCacheConfig,
        max_model_len: int,
        *,
        num_stages: int = 1,
        keeps_samples: bool = False,
    ) -> None:
        """`num_stages` steps run at the same time, so each takes its part of the requests."""
        if kv.num_blocks * kv.block_size < max_model_len:
            raise ValueError(
                f"{kv.num_blocks} blocks of {kv.block_size} tokens do not hold {max_model_len}"
            )
        self._max_tokens_per_step = config.max_num_batched_tokens
        # With more running requests than tokens in a step, the last ones would starve.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._has_chunked_prefill = config.enable_chunked_prefill
        self._max_model_len = max_model_len
        self._num_stages = num_stages
        self._keeps_samples = keeps_samples
        self._kv = KVCacheManager(
            kv.num_blocks, kv.block_size, enable_prefix_caching=cache.enable_prefix_caching
        )
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._by_number: dict[int, Request] = {}
        self._removed: list[int] = []
        self._next_number = 0
        self._counters = _Counters()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def unfinished_ids(self) -> list[str]:
        """Ids of all requests that wait or run."""
        return list(self._requests)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run, or its id is in use.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use", parameter="request_id"
            )
        verify_request(
            request,
            max_model_len=self._max_model_len,
            max_chunk_tokens=None if self._has_chunked_prefill else self._max_tokens_per_step,
        )
        added = Request(request, self._max_model_len)
        self._requests[added.request_id] = added
        self._waiting.append(added)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests in any state and free their blocks; gives the ids that existed."""
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self._running.remove(request)
            else:
                self._waiting.remove(request)
            self._finish(request)
            aborted.append(request_id)
        return aborted

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when there is nothing to compute (all waits for results)."""
        builder = StepBuilder(self._max_tokens_per_step, keeps_samples=self._keeps_samples)
        has_preempted = self._schedule_running(builder)
        if not has_preempted:
            self._schedule_waiting(builder)
        if builder.is_empty:
            return None
        removed, self._removed = self._removed, []
        step = self._counters.steps
        self._counters.steps += 1
        return builder.build(step, removed)

    def update_from_output(
        self, out: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineOutput]:
        """Take the result of a step; gives the new tokens of requests that still exist.

        Raises:
            RuntimeError: the result does not belong to the step.
        """
        numbers = [data.number for data in out.new] + out.running.numbers
        if result.step != out.step or result.numbers != numbers:
            raise RuntimeError(
                f"result of step {result.step} for {result.numbers} does not answer step "
                f"{out.step} for {numbers}"
            )
        outputs = []
        for index, number in enumerate(numbers):
            request = self._by_number.get(number)
            if request is None:
                continue  # aborted or preempted since the step was scheduled
            self._confirm(request, out.num_scheduled_tokens[index])
            token_id = result.token_ids[index]
            is_due = request.num_confirmed_tokens == request.num_tokens
            if is_due != (token_id >= 0):
                raise RuntimeError(
                    f"step {out.step}: token {token_id} for request number {number} with "
                    f"{request.num_confirmed_tokens} of {request.num_tokens} tokens computed"
                )
            if is_due:
                logprobs = None if result.logprobs is None else result.logprobs[index]
                outputs.append(self._take_token(request, token_id, logprobs))
        return outputs

    def stats(self) -> SchedulerStats:
        """Sizes and counters at this moment."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_kv_blocks=self._kv.num_blocks,
            num_free_kv_blocks=self._kv.num_free_blocks,
            prompt_tokens_total=self._counters.prompt_tokens,
            generation_tokens_total=self._counters.generation_tokens,
            computed_prompt_tokens_total=self._counters.computed_prompt_tokens,
            prefix_cache_hit_tokens_total=self._counters.prefix_hit_tokens,
            prefix_cache_query_tokens_total=self._counters.prefix_query_tokens,
            preemptions_total=self._counters.preemptions,
            steps_total=self._counters.steps,
        )

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; gives how many blocks were findable."""
        return self._kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check queues and blocks against each other; for tests and the `check_integrity` call.

        Raises:
            RuntimeError: what disagrees.
        """
        self._kv.check_integrity()
        if {request.number for request in self._running} != set(self._by_number):
            raise RuntimeError("the running list and the numbers in use disagree")
        if len(self._running) + len(self._waiting) != len(self._requests):
            raise RuntimeError("a request is in no queue, or in two")

    # ---- putting a step together ------------------------------------------------------------

    def _schedule_running(self, builder: StepBuilder) -> bool:
        """Give every running request its tokens; gives whether any was preempted."""
        num_preemptions = self._counters.preemptions
        # One step with everybody would leave all pipeline stages but one without work.
        max_rows = -(-len(self._running) // self._num_stages)
        index = 0
        while (
            index < len(self._running)
            and builder.num_tokens_left > 0
            and builder.num_running < max_rows
        ):
            request = self._running[index]
            num_tokens = min(request.num_pending_tokens, builder.num_tokens_left)
            if num_tokens > 0:  # else its next token is in flight
                new_block_ids = self._extend_or_preempt(request, num_tokens)
                if new_block_ids is None:
                    break
                builder.add_running(request, new_block_ids, num_tokens)
            index += 1
        return self._counters.preemptions > num_preemptions

    def _extend_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for the tokens; requests that arrived later give way. None: it gave way itself.

        Those are behind `request` in the running list, so none of them is in the step yet.
        """
        while True:
            new = self._kv.extend(request, request.num_computed_tokens + num_tokens)
            if new is not None:
                return new
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def _schedule_waiting(self, builder: StepBuilder) -> None:
        while (
            self._waiting and builder.num_tokens_left > 0 and len(self._running) < self._max_running
        ):
            request = self._waiting[0]
            prefix = self._kv.find_prefix(request)
            num_left = request.num_tokens - len(prefix) * self._kv.block_size
            num_tokens = min(num_left, builder.num_tokens_left)
            if num_tokens < num_left and not self._may_split(num_left):
                break
            # The whole request has to fit, not only this chunk: a prompt that runs out of blocks
            # half-way would be computed for nothing.
            headroom = -(-self._kv.num_blocks // _HEADROOM_FRACTION) if self._running else 0
            num_needed = self._kv.blocks_to_admit(prefix, request.num_tokens)
            if num_needed + headroom > self._kv.num_free_blocks:
                break
            self._waiting.popleft()
            self._admit(request, prefix, num_tokens)
            builder.add_new(request, self._kv.block_table(request), num_tokens)

    def _may_split(self, num_tokens: int) -> bool:
        """Whether a prompt may be computed in chunks.

        Without chunked prefill only one that has outgrown the budget of a step: it was preempted
        after it had generated tokens, and could not be computed otherwise.
        """
        return self._has_chunked_prefill or num_tokens > self._max_tokens_per_step

    def _admit(self, request: Request, prefix: list[int], num_tokens: int) -> None:
        request.number = self._next_number
        self._next_number += 1
        num_hit_tokens = len(prefix) * self._kv.block_size
        self._kv.admit(request, prefix, num_hit_tokens + num_tokens)
        request.num_computed_tokens = num_hit_tokens
        request.status = RequestStatus.RUNNING
        self._running.append(request)
        self._by_number[request.number] = request
        if request.was_admitted:
            return
        request.was_admitted = True
        request.num_cached_tokens = num_hit_tokens
        self._counters.prompt_tokens += request.num_prompt_tokens
        if self._kv.has_prefix_cache:
            self._counters.prefix_query_tokens += request.num_prompt_tokens
            self._counters.prefix_hit_tokens += num_hit_tokens

    # ---- what happens to a request ------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        self._give_back(request)
        request.rewind()
        self._waiting.appendleft(request)
        self._counters.preemptions += 1

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._give_back(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _give_back(self, request: Request) -> None:
        self._kv.free(request)
        del self._by_number[request.number]
        self._removed.append(request.number)

    def _confirm(self, request: Request, num_tokens: int) -> None:
        before = min(request.num_confirmed_tokens, request.num_prompt_tokens)
        request.num_in_flight_tokens -= num_tokens
        after = min(request.num_confirmed_tokens, request.num_prompt_tokens)
        self._counters.computed_prompt_tokens += after - before
        self._kv.share_full_blocks(request)

    def _take_token(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> EngineOutput:
        self._counters.generation_tokens += 1
        reason, stop_token_id = request.append_token(token_id)
        if self._keeps_samples:
            request.num_unknown_tokens -= 1
        else:
            request.unsent_token_id = token_id
        num_cached_tokens = 0 if request.was_output else request.num_cached_tokens
        request.was_output = True
        if reason is not None:
            self._running.remove(request)
            self._finish(request)
        return EngineOutput(
            request_id=request.request_id,
            new_token_ids=[token_id],
            finish_reason=None if reason is None else str(reason),
            stop_token_id=stop_token_id,
            num_cached_tokens=num_cached_tokens,
            logprobs=None if logprobs is None else [logprobs],
        )


def ended_output(request_id: str, reason: FinishReason, error: str = "") -> EngineOutput:
    """An output without tokens that only says how the request ended."""
    return EngineOutput(
        request_id=request_id, new_token_ids=[], finish_reason=str(reason), error=error
    )
