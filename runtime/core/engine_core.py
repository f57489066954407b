"""The engine without the process around it: KV start-up, then schedule -> execute -> update.

    start_step:   schedule -> execute_model (returns at once) -> in flight
    finish_step:  oldest step in flight -> result (none: sample_tokens) -> update

Between the two, requests may come and go. `overlap` says how many steps may be in flight.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from vcli.runtime.config import EngineConfig
from vcli.runtime.core.kv_config import plan_kv_cache
from vcli.runtime.core.overlap import decide_overlap
from vcli.runtime.core.scheduler import Scheduler
from vcli.runtime.errors import RequestError
from vcli.runtime.executor.base import Executor
from vcli.runtime.log import get_logger
from vcli.runtime.messages import (
    EngineOutput,
    EngineRequest,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
)

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    output: SchedulerOutput
    future: "Future[ModelRunnerOutput | None]"


class EngineCore:
    """Scheduler and executor of one replica. Not thread-safe: one thread owns it.

    The constructor needs a started executor with loaded models; it sizes the KV cache and warms
    up, which takes seconds.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.overlap = decide_overlap(config, backend_can_overlap=executor.can_overlap_steps)
        self.kv_config = initialize_kv_cache(config, executor)
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            self.kv_config,
            config.model.max_model_len,
            num_stages=self.overlap.num_stages,
            keeps_samples=self.overlap.keeps_samples,
        )
        self._executor = executor
        self._vocab_size = config.model.spec.vocab_size
        self._in_flight: deque[_StepInFlight] = deque()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished

    @property
    def oldest_step(self) -> "Future[ModelRunnerOutput | None] | None":
        """The result that `finish_step` will take; None when no step is in flight."""
        return self._in_flight[0].future if self._in_flight else None

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run; the engine is as it was.
        """
        # One token outside the embedding would end every rank.
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary of {self._vocab_size}",
                    parameter="prompt",
                )
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests, their blocks are free at once; gives the ids that existed."""
        return self.scheduler.abort(request_ids)

    def start_step(self) -> "Future[ModelRunnerOutput | None] | None":
        """Hand the next step to the workers; None if there is none or enough are in flight."""
        if len(self._in_flight) >= self.overlap.num_steps:
            return None
        if self._in_flight and self._in_flight[-1].output.defer_sampling:
            return None  # the workers sample it before they take another
        output = self.scheduler.schedule()
        if output is None:
            if self.scheduler.has_unfinished and not self._in_flight:
                raise RuntimeError("requests are unfinished, but none of them can be scheduled")
            return None
        future = self._executor.execute_model(output, non_block=True)
        self._in_flight.append(_StepInFlight(output, future))
        return future

    def finish_step(self) -> list[EngineOutput]:
        """Wait for the oldest step in flight and give its new tokens.

        Raises:
            WorkerError, WorkerDiedError, RpcTimeoutError: the step failed; the engine is lost.
        """
        step = self._in_flight.popleft()
        result = step.future.result()
        if result is None:  # sampling was left out, or a mask for it had to be made first
            result = self._executor.sample_tokens(None)
            if result is None:
                raise RuntimeError(f"sampling gave nothing in step {step.output.step}")
        return self.scheduler.update_from_output(step.output, result)

    def step(self) -> list[EngineOutput]:
        """Start what can be started and finish one step; nothing to do gives nothing."""
        while self.start_step() is not None:
            pass
        return self.finish_step() if self._in_flight else []


def initialize_kv_cache(config: EngineConfig, executor: Executor) -> KVCacheConfig:
    """Measure, size, allocate and warm up on all ranks; the order matters.

    Raises:
        UnfitError, ConfigError: too little memory for one sequence.
    """
    # Measured before anything is allocated for the cache, warmed up after: graphs and kernels
    # keep pointers into it.
    available_bytes = executor.determine_available_memory()
    bytes_per_block: list[int] = executor.collective_rpc(
        "kv_bytes_per_block", timeout_s=config.deadlines.start_left_s()
    )
    kv = plan_kv_cache(
        available_bytes,
        bytes_per_block,
        block_size=config.cache.block_size,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        requested_bytes=config.cache.kv_cache_memory_bytes,
    )
    logger.info(
        "KV cache num_blocks=%d block_size=%d tokens=%d bytes_per_rank=%s",
        kv.num_blocks,
        kv.block_size,
        kv.num_blocks * kv.block_size,
        [kv.num_blocks * size for size in bytes_per_block],
    )
    executor.initialize_from_config(kv)
    executor.compile_or_warm_up_model()
    return kv
