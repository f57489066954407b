"""A signal while `vcli serve` still waits for the core to be started."""

import gc
import logging
import os
import signal
import socket
import threading
from typing import Any, cast

import pytest

from tests.support.fake_worker import fake_config
from vcli.runtime.launch import serve
from vcli.runtime.process.fork_client import StartCancelledError
from vcli.topology import ExitStatus


class ImportsForLong:
    """A fork server that gives no child; the first one that is asked for brings a signal."""

    preloaded = None

    def __init__(self, number: int) -> None:
        self._number = number
        self._is_cancelled = threading.Event()
        self.starter = self

    def new_link(self) -> None:
        return None

    def start(self, _spec: object, *, end_s: float | None = None) -> None:
        os.kill(os.getpid(), self._number)
        assert self._is_cancelled.wait(20)
        raise StartCancelledError("the start was cancelled")

    def cancel_starts(self) -> None:
        self._is_cancelled.set()


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, ExitStatus.TERMINATED), (signal.SIGINT, ExitStatus.INTERRUPTED)],
)
def test_start_that_a_signal_cancels_leaves_no_exception_behind(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    status: ExitStatus,
) -> None:
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    fork_server = cast("Any", ImportsForLong(number))
    with socket.create_server(("127.0.0.1", 0)) as listener, caplog.at_level(logging.ERROR):
        ended = serve.serve_until_stopped(
            fake_config(),
            listener,
            view=cast("Any", SilentView()),
            environ={},
            tokenizer=cast("Any", object()),
            fork_server=fork_server,
        )
        gc.collect()
    assert ended is status
    assert [record.getMessage() for record in caplog.records] == []


class SilentView:
    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None
