"""Which signals are the first and the second, whoever sends them."""

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from vcli.runtime.launch.start_phase import StartPhase
from vcli.runtime.launch.stop_signals import StopSignals
from vcli.runtime.messages import ChildState
from vcli.topology.errors import ExitStatus

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("hang_up_ends")]


def after(numbers: Sequence[signal.Signals]) -> tuple[ExitStatus, bool, list[str]]:
    """Exit status, whether it was asked to end at once, and what was said."""

    async def main() -> tuple[ExitStatus, bool, list[str]]:
        said: list[str] = []
        signals = StopSignals(said.append)
        signals.install()
        have_come = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, have_come.set)
        try:
            for number in (*numbers, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            await asyncio.wait_for(have_come.wait(), 20)
        finally:
            loop.remove_signal_handler(signal.SIGUSR2)
            signals.uninstall()
        return signals.exit_status, signals.second.is_set(), said

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("numbers", "status", "is_at_once"),
    [
        ([signal.SIGINT], ExitStatus.INTERRUPTED, False),
        ([signal.SIGTERM], ExitStatus.TERMINATED, False),
        ([signal.SIGHUP], ExitStatus.TERMINATED, False),
        ([signal.SIGINT, signal.SIGINT], ExitStatus.INTERRUPTED, True),
        ([signal.SIGTERM, signal.SIGINT], ExitStatus.TERMINATED, True),
        ([signal.SIGHUP, signal.SIGTERM], ExitStatus.TERMINATED, False),
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGINT], ExitStatus.TERMINATED, True),
        ([signal.SIGTERM, signal.SIGHUP], ExitStatus.TERMINATED, False),
        ([signal.SIGHUP, signal.SIGHUP], ExitStatus.TERMINATED, False),
    ],
)
def test_first_asks_for_a_drain_and_a_second_that_is_no_hang_up_for_the_end(
    numbers: list[signal.Signals], status: ExitStatus, is_at_once: bool
) -> None:
    assert after(numbers) == (status, is_at_once, [f"stopping: {numbers[0].name}"])


def test_hang_up_that_was_to_be_ignored_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert after([signal.SIGHUP]) == (ExitStatus.OK, False, [])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_node_that_stops_before_or_after_a_signal_here_is_no_second_one() -> None:
    """A signal to all nodes of a job comes to each of them, and from each to node 0."""

    async def main() -> None:
        said: list[str] = []
        signals = StopSignals(said.append)
        signals.ask(ExitStatus.TERMINATED, "stopping: node 1 was stopped")
        signals.ask(ExitStatus.INTERRUPTED, "stopping: node 2 was stopped")
        signals._on_signal(signal.SIGTERM)
        assert signals.exit_status is ExitStatus.TERMINATED
        assert not signals.second.is_set()
        assert said == ["stopping: node 1 was stopped"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("state", "fraction", "doing"),
    [
        ("imported", None, "opening the devices"),
        ("groups", None, "loading the weights"),
        ("weights", 0.4, "loading the weights"),
        ("weights", 1.0, "measuring the memory"),
        ("graphs", 0.5, "capturing graphs"),
        ("warm-up", None, "warming up"),
    ],
)
def test_phase_is_what_follows_the_state_that_was_reached(
    state: str, fraction: float | None, doing: str
) -> None:
    phase = StartPhase()
    phase.take(ChildState(process="Worker_TP0", state=state, seconds=1.0, pid=7, fraction=fraction))
    assert phase.doing == doing
