"""Who owes an answer and gives none is named, and nobody is for the sake of a clock."""

import logging
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.processes import wait_until
from vcli.runtime.process.held import describe_stop
from vcli.runtime.process.silence import LOOK_EVERY_S, SilenceWatch

pytestmark = pytest.mark.process

STALL_S, LIMIT_S = 10.0, 20.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Watched:
    """A program, its watch, and the time of that."""

    def __init__(self) -> None:
        self.program = subprocess.Popen(["sleep", "600"])
        self.pid = self.program.pid
        self.clock = Clock()
        self.watch = SilenceWatch(
            "EngineCore", self.pid, stall_s=STALL_S, limit_s=LIMIT_S, clock=self.clock
        )

    def look(self, times: int = 1, every_s: float = LOOK_EVERY_S) -> list[str]:
        """The failures' kinds that so many looks gave."""
        kinds = []
        for _ in range(times):
            self.clock.now_s += every_s
            if (report := self.watch.look()) is not None:
                kinds.append(report.kind)
        return kinds

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: describe_stop(self.pid) != "")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        wait_until(lambda: not describe_stop(self.pid))


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.program.kill()
    watched.program.wait()


def test_stopped_process_is_named_by_the_second_look_and_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.stop()
    with caplog.at_level(logging.WARNING, logger="vcli"):
        watched.look()
        assert watched.watch.trouble == ""
        watched.look(3)
    (record,) = caplog.records
    for text in (record.getMessage(), watched.watch.trouble):
        assert f"EngineCore pid {watched.pid} is stopped" in text
        assert f"kill -CONT {watched.pid}" in text


def test_process_that_goes_on_is_well_again_as_soon_as_it_is_heard(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.stop()
    watched.look(5)
    watched.go_on()
    with caplog.at_level(logging.WARNING, logger="vcli"):
        watched.watch.heard()
    assert "answers again after 5 s" in caplog.text
    assert watched.watch.trouble == ""
    assert watched.look(int(LIMIT_S) - 1) == []


def test_debugger_that_stops_it_for_a_moment_is_nothing(watched: Watched) -> None:
    for _ in range(3):
        watched.stop()
        watched.look()
        watched.go_on()
        watched.look()
    assert watched.watch.trouble == ""


def test_silent_process_is_named_at_the_stall_and_a_failure_at_the_limit(watched: Watched) -> None:
    assert watched.look(int(STALL_S) - 1) == []
    assert watched.watch.trouble == ""
    assert watched.look() == []
    assert f"EngineCore pid {watched.pid} has not answered for 10 s" in watched.watch.trouble
    assert watched.look(int(LIMIT_S - STALL_S) - 1) == []
    assert watched.look() == ["ProcessStuck"]


def test_failure_of_a_stopped_process_says_so(watched: Watched) -> None:
    watched.stop()
    assert watched.look(int(LIMIT_S)) == ["ProcessStopped"]


def test_time_in_which_nobody_could_look_does_not_count(watched: Watched) -> None:
    """The host was suspended, or the whole instance frozen."""
    assert watched.look(4, every_s=10_000.0) == []
    assert watched.watch.trouble == ""


def test_silence_begins_anew_when_something_is_awaited_again(watched: Watched) -> None:
    watched.look(9)
    watched.watch.rest()
    watched.look(9)
    assert watched.watch.trouble == ""


def test_sign_of_life_is_asked_for_once_and_owed_until_it_comes(watched: Watched) -> None:
    watched.look()
    assert not watched.watch.wants_to_ask()
    watched.look()
    assert watched.watch.wants_to_ask()
    assert not watched.watch.wants_to_ask()
    assert watched.watch.is_owed
    watched.watch.heard()
    assert not watched.watch.is_owed
