"""What a client may ask the engine core besides tokens, and how it is answered.

An allow-list: method name -> function. What needs the workers is asked without waiting, so that
requests go on meanwhile; the loop hears of the answers by a `CallDone`.
"""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from vcli.runtime.core.core_events import CallDone, CoreEvent
from vcli.runtime.core.engine_core import EngineCore
from vcli.runtime.errors import RequestError, RpcTimeoutError
from vcli.runtime.executor.base import Executor
from vcli.runtime.messages import UtilityCall, UtilityReply

WORKER_METHODS = frozenset(
    {
        "check_health",
        "group_reports",
        "kv_bytes_per_block",
        "memory_report",
        # of the worker extension that `vcli bench offline` brings
        "bench_copy",
        "bench_device",
        "bench_noop",
    }
)
"""Worker methods that a client may call by `collective_rpc`; none of them changes anything."""

MAX_TIMEOUT_S = 60.0
DEFAULT_TIMEOUT_S = 5.0

_Answer = Callable[["tuple[Future[Any], ...]"], Any]


class UtilityCalls:
    """Runs calls on the core loop's thread; every call gets exactly one reply."""

    def __init__(
        self,
        engine: EngineCore,
        executor: Executor,
        *,
        world_size: int,
        send: Callable[[UtilityReply], None],
        put: Callable[[CoreEvent], None],
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._world_size = world_size
        self._send = send
        self._put = put
        self._waiting: dict[int, _Answer] = {}
        self._local: Mapping[str, Callable[..., Any]] = {
            "ping": os.getpid,
            "stats": self._stats,
            "reset_prefix_cache": engine.scheduler.reset_prefix_cache,
            "check_integrity": self._check_integrity,
        }
        self._remote: Mapping[str, Callable[..., tuple[tuple[Future[Any], ...], _Answer]]] = {
            "check_health": self._check_health,
            "collective_rpc": self._collective_rpc,
        }

    def start(self, call: UtilityCall) -> None:
        """Answer now, or as soon as the workers have."""
        try:
            if call.method in self._local:
                value = self._local[call.method](*call.arguments)
                self._send(UtilityReply(call_id=call.call_id, value=value))
            elif call.method in self._remote:
                futures, answer = self._remote[call.method](*call.arguments)
                self._waiting[call.call_id] = answer
                self._notify_when_done(call.call_id, futures)
            else:
                known = ", ".join(sorted([*self._local, *self._remote]))
                raise RequestError(
                    f"unknown method {call.method!r}; known: {known}", parameter="method"
                )
        except Exception as error:  # noqa: BLE001 - border: a call must not end the engine
            self._send(UtilityReply(call_id=call.call_id, error=_text_of(error)))

    def finish(self, done: CallDone) -> None:
        """Answer a call that waited for the workers."""
        answer = self._waiting.pop(done.call_id, None)
        if answer is None:
            return  # its client used the number twice, and has the answer to the other call
        try:
            value = msgspec.to_builtins(answer(done.futures))
        except Exception as error:  # noqa: BLE001 - border: a call must not end the engine
            self._send(UtilityReply(call_id=done.call_id, error=_text_of(error)))
        else:
            self._send(UtilityReply(call_id=done.call_id, value=value))

    def _notify_when_done(self, call_id: int, futures: "tuple[Future[Any], ...]") -> None:
        lock = threading.Lock()
        num_left = len(futures)

        def count_down(_: "Future[Any]") -> None:
            nonlocal num_left
            with lock:
                num_left -= 1
                is_last = num_left == 0
            if is_last:
                self._put(CallDone(call_id, futures))

        for future in futures:
            future.add_done_callback(count_down)

    def _stats(self) -> Any:
        return msgspec.to_builtins(self._engine.scheduler.stats())

    def _check_integrity(self) -> bool:
        self._engine.scheduler.check_integrity()
        return True

    def _check_health(
        self, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> "tuple[tuple[Future[Any], ...], _Answer]":
        """Ask each rank by itself, so that one that is stuck does not hide the others."""
        futures = tuple(
            self._executor.collective_rpc(
                "check_health",
                timeout_s=_capped(timeout_s),
                non_block=True,
                unique_reply_rank=rank,
            )
            for rank in range(self._world_size)
        )
        return futures, self._health_of

    def _health_of(self, futures: "tuple[Future[Any], ...]") -> dict[str, Any]:
        """Who answered, who is only busy, and who is missing."""
        errors = {
            rank: error
            for rank, future in enumerate(futures)
            if (error := future.exception(timeout=0)) is not None
        }
        busy = {
            rank: activity.describe()
            for rank, error in errors.items()
            if isinstance(error, RpcTimeoutError)
            and (activity := self._executor.busy_with(rank)) is not None
        }
        missing = sorted(errors.keys() - busy.keys())
        return {
            "is_healthy": not missing,
            "answered": [rank for rank in range(len(futures)) if rank not in errors],
            "busy": {str(rank): text for rank, text in busy.items()},
            "missing": missing,
            "errors": {str(rank): _text_of(errors[rank]) for rank in missing},
        }

    def _collective_rpc(
        self,
        method: str,
        args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> "tuple[tuple[Future[Any], ...], _Answer]":
        if method not in WORKER_METHODS:
            raise RequestError(
                f"worker method {method!r} may not be called by a client; "
                f"allowed: {', '.join(sorted(WORKER_METHODS))}",
                parameter="method",
            )
        future = self._executor.collective_rpc(
            method,
            timeout_s=_capped(timeout_s),
            args=tuple(args or ()),
            kwargs=kwargs,
            non_block=True,
        )
        return (future,), lambda futures: futures[0].result(timeout=0)


def _capped(timeout_s: float) -> float:
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(
            f"timeout_s={timeout_s} must be above 0 and at most {MAX_TIMEOUT_S:g}",
            parameter="timeout_s",
        )
    return timeout_s


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
