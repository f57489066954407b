"""The engine core's process: a loop around `EngineCore` that sleeps unless there is work.

    client's socket -----ClientMessage----|
    replies of workers --StepDone, CallDone--> inbox -> loop (main thread) -> client's socket
    executor's monitor --ExecutorFailed---|

The loop waits in one place, the inbox, also while a step runs: requests, aborts and calls are
handled meanwhile, and a failure wakes it at once. It reads, takes replies and writes itself, since
each thread in between would be one more to wake.
"""

import socket
import time
from queue import Empty
from typing import TYPE_CHECKING, Any

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.core.client_channel import ClientChannel
from vcli.runtime.core.core_events import (
    CallDone,
    ClientGone,
    CoreEvent,
    ExecutorFailed,
    StepDone,
)
from vcli.runtime.core.core_inbox import CoreInbox
from vcli.runtime.core.engine_core import EngineCore
from vcli.runtime.core.failure_cause import FailureCause
from vcli.runtime.core.overlap import decide_overlap
from vcli.runtime.core.request import FinishReason
from vcli.runtime.core.scheduler import ended_output
from vcli.runtime.core.utility_calls import UtilityCalls
from vcli.runtime.errors import FailureReport, RequestError, RpcTimeoutError, WorkerDiedError
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.executor.base import Executor
from vcli.runtime.log import get_logger
from vcli.runtime.messages import (
    AbortRequests,
    ChildFailure,
    ChildMessage,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    ShutdownCore,
    UtilityCall,
)
from vcli.runtime.process.child import ChildContext
from vcli.runtime.process.fork_client import starter_of
from vcli.runtime.process.starter import Starter
from vcli.runtime.worker.watchdog import Watchdog
from vcli.topology.errors import ExitStatus

if TYPE_CHECKING:
    from vcli.runtime.executor.node_messages import NodeLinks

logger = get_logger(__name__)

_FLUSH_S = 1.0
"""How long the client may take to read the last messages."""

_STEP_GRACE_S = 5.0
"""Beyond the executor's own deadline for a step, before the loop gives up by itself."""

_WAIT_PART_S = 5.0
"""Of a wait that is cut into parts: of the time for which the process was stopped, one counts."""


def core_main(
    context: ChildContext, config: EngineConfig, client_fd: int, nodes: "NodeLinks | None" = None
) -> None:
    """Be the engine core behind the socket `client_fd` until it is told to stop.

    `nodes` is how it reaches the ranks on other nodes, if there are any.

    Raises:
        SystemExit: the exit status, when the core ended because something failed.
    """
    backend = config.plan.backend.value if nodes is None else "multinode"
    executor_class = get_executor_class(backend)
    context.page.tell(groups=_groups_of(config))
    client = socket.socket(fileno=client_fd)
    core = EngineCoreProc(
        context,
        config,
        client,
        executor_class,
        starter=starter_of(context),
        watchdog=Watchdog(config.deadlines.stall_s, page=context.page),
        nodes=nodes,
    )
    status = core.run()
    if status is not ExitStatus.OK:
        raise SystemExit(int(status))


def _groups_of(config: EngineConfig) -> dict[str, list[list[int]]]:
    """Ranks of each group of this replica by kind, for who reads the page of this process."""
    dp_rank = config.parallel.data_parallel_rank or 0
    groups: dict[str, dict[tuple[int, ...], None]] = {}
    for rank in range(config.plan.world_size):
        for group in config.plan.rank_plan(rank, dp_rank).groups:
            groups.setdefault(str(group.kind), {})[tuple(group.ranks)] = None
    return {kind: list(map(list, found)) for kind, found in groups.items()}


class EngineCoreProc:
    """The loop and what it needs; one thread runs it, the main one in a process of its own."""

    def __init__(
        self,
        context: ChildContext,
        config: EngineConfig,
        client: socket.socket,
        executor_class: type[Executor],
        *,
        starter: Starter | None = None,
        watchdog: Watchdog | None = None,
        nodes: "NodeLinks | None" = None,
    ) -> None:
        """`watchdog` belongs to the process, so only one that is the core's own may have it."""
        self._context = context
        self._config = config
        self._inbox = CoreInbox()
        self._channel = ClientChannel(client, self._inbox.put)
        self._cause = FailureCause(context.title)
        # Before anything is started: what was asked for may be impossible.
        decide_overlap(config, backend_can_overlap=executor_class.can_overlap_steps)
        self._executor = executor_class(config, on_message=self._on_worker_message)
        if starter is not None:
            self._executor.use_starter(starter)
        if nodes is not None:
            self._executor.use_nodes(nodes)
        self._watchdog = watchdog
        self._is_draining = False
        self._is_stopping = False
        self._step_waited_s = 0.0
        self._engine: EngineCore
        self._calls: UtilityCalls

    def run(self) -> ExitStatus:
        """Start, serve, stop; gives the exit status."""
        try:
            self._start()
            self._serve()
            self._end_requests()
        except Exception as error:  # noqa: BLE001 - border: the core loop, every failure is told
            return self._fail(error)
        finally:
            self._inbox.close()
            self._executor.shutdown()
            self._channel.close(_FLUSH_S)
        return ExitStatus.OK

    # ---- start ------------------------------------------------------------------------------

    def _start(self) -> None:
        self._executor.start()
        self._executor.register_failure_callback(self._on_executor_failure)
        self._context.set_phase("kv")
        self._engine = EngineCore(self._config, self._executor)
        reports = self._executor.group_reports()
        self._calls = UtilityCalls(
            self._engine,
            self._executor,
            world_size=self._config.plan.world_size,
            send=self._channel.send,
            put=self._inbox.put,
        )
        self._inbox.listen(self._executor, self._channel.fileno(), self._channel.read)
        # Before ready: the client may send, and a worker may die, from that moment on.
        self._cause.set_serving()
        self._context.ready(
            {
                "num_kv_blocks": self._engine.kv_config.num_blocks,
                "block_size": self._engine.kv_config.block_size,
                "max_model_len": self._config.model.max_model_len,
                "group_reports": [msgspec.to_builtins(report) for report in reports],
                "memory": [msgspec.to_builtins(each) for each in self._executor.memory_reports()],
                "worker_pids": dict(self._executor.worker_pids),
                "effective": self._effective(),
            }
        )
        logger.info("ready seconds=%.2f", self._context.seconds())

    def _effective(self) -> dict[str, Any]:
        return {
            "executor": type(self._executor).__name__,
            "prefix_caching": self._config.cache.enable_prefix_caching,
            "chunked_prefill": self._config.scheduler.enable_chunked_prefill,
            "async_scheduling": self._engine.overlap.keeps_samples,
            "steps_in_flight": self._engine.overlap.num_steps,
            "spin": self._executor.spin.describe(),
            "max_num_seqs": self._config.scheduler.max_num_seqs,
            "max_num_batched_tokens": self._config.scheduler.max_num_batched_tokens,
        }

    def _on_worker_message(self, message: ChildMessage) -> None:
        # A failure is not passed on as it comes: `run` tells the one that is the cause.
        if not isinstance(message, ChildFailure):
            self._context.forward(message)

    def _on_executor_failure(self, report: FailureReport) -> None:
        # In the monitor's thread: the client hears of it even if the loop cannot run now.
        cause = self._cause.observe(report)
        self._channel.fail(cause)
        self._inbox.put(ExecutorFailed(cause))

    # ---- the loop ---------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            self._start_steps()
            if self._is_stopping or (self._is_draining and not self._engine.has_unfinished):
                return
            # Two steps may be done at once, and their events are taken together.
            if not self._is_oldest_step_done():
                self._handle(self._next_event())
            self._handle_queued_events()
            if self._is_oldest_step_done():
                self._publish(self._engine.finish_step())
                if self._watchdog is not None and self._engine.oldest_step is None:
                    self._watchdog.end()

    def _is_oldest_step_done(self) -> bool:
        oldest = self._engine.oldest_step
        return oldest is not None and oldest.done()

    def _start_steps(self) -> None:
        while (future := self._engine.start_step()) is not None:
            self._step_waited_s = 0.0
            if self._watchdog is not None:
                self._watchdog.begin()
            future.add_done_callback(lambda _: self._inbox.put(StepDone()))

    def _next_event(self) -> CoreEvent:
        """The next thing to do; sleeps until there is one.

        Without a step in flight there is no deadline: the client's end and a worker's end wake
        this wait. With one, the time counts in which this process ran: it may have been stopped.
        """
        if self._engine.oldest_step is None:
            return self._inbox.get()
        limit_s = self._config.deadlines.execute_model_s + _STEP_GRACE_S
        while self._step_waited_s < limit_s:
            begin_s, part_s = time.monotonic(), min(_WAIT_PART_S, limit_s - self._step_waited_s)
            try:
                return self._inbox.get(part_s)
            except Empty:
                continue
            finally:
                self._step_waited_s += min(time.monotonic() - begin_s, part_s)
        raise RpcTimeoutError(f"execute_model gave no result within {limit_s:g} s")

    def _handle_queued_events(self) -> None:
        for event in self._inbox.take_all():
            self._handle(event)

    def _handle(self, event: CoreEvent) -> None:
        match event:
            case StepDone():
                return
            case EngineRequest():
                self._add(event)
            case AbortRequests():
                # Told at once: the next step may be long, or never come.
                if self._engine.abort_requests(event.request_ids):
                    self._publish([])
            case UtilityCall():
                self._calls.start(event)
            case CallDone():
                self._calls.finish(event)
            case ShutdownCore():
                self._is_draining = True
                self._is_stopping = self._is_stopping or not event.drain
            case ClientGone():
                self._is_stopping = True
            case ExecutorFailed():
                raise WorkerDiedError(event.report)

    def _add(self, request: EngineRequest) -> None:
        try:
            if self._is_draining:
                raise RequestError("the engine is shutting down and takes no new requests")
            self._engine.add_request(request)
        except RequestError as error:
            text = f"{error.message}; {error.hint}" if error.hint else error.message
            self._publish([ended_output(request.request_id, FinishReason.ERROR, text)])

    def _publish(self, outputs: list[EngineOutput]) -> None:
        stats = self._engine.scheduler.stats()
        self._channel.send(EngineOutputs(outputs=outputs, stats=stats))

    # ---- the end ----------------------------------------------------------------------------

    def _end_requests(self) -> None:
        """Tell the client that what is unfinished will stay so."""
        aborted = self._engine.abort_requests(self._engine.scheduler.unfinished_ids())
        self._publish([ended_output(request_id, FinishReason.ABORT) for request_id in aborted])

    def _fail(self, error: Exception) -> ExitStatus:
        report = self._cause.of(error)
        # The client first: it has requests to answer. Then the parent, which ends the process.
        self._channel.fail(report)
        logger.info("%s%s", report.describe(), report.traceback and f"\n{report.traceback}")
        self._context.fail(report)
        return ExitStatus(report.exit_status)
