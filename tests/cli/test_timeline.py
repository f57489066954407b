"""The table of `vcli serve --timeline`."""

from vcli.cli.views.timeline import StartupTimeline, timeline_lines
from vcli.runtime.errors import FailureReport
from vcli.runtime.messages import ChildFailure, ChildReady, ChildState


def state(name: str, seconds: float, *, process: str = "Worker_TP0", pid: int = 7) -> ChildState:
    return ChildState(process=process, state=name, seconds=seconds, pid=pid)


def test_times_count_from_the_beginning_of_the_command() -> None:
    timeline = StartupTimeline(100.0)
    timeline.take(state("spawned", 0.5), 102.5)
    timeline.take(ChildReady(process="Worker_TP0", seconds=3.0, pid=7), 105.0)

    assert [line.split() for line in timeline_lines(timeline)] == [
        ["process", "pid", "started", "t0", "spawned", "t9", "ready"],
        ["Worker_TP0", "7", "2.00", "2.50", "5.00"],
    ]


def test_a_message_that_came_late_does_not_move_the_start() -> None:
    timeline = StartupTimeline(0.0)
    timeline.take(state("spawned", 0.1), 9.0)
    timeline.take(state("imported", 1.0), 2.0)
    timeline.take(state("device", 1.5), 8.0)

    (row,) = timeline.rows()
    assert row.started_s == 1.0
    assert row.at("spawned") == 1.1
    assert row.at("kv") is None


def test_of_a_state_with_progress_its_end_counts() -> None:
    timeline = StartupTimeline(0.0)
    for seconds in (1.0, 2.0, 3.0):
        timeline.take(state("weights", seconds), seconds)

    assert timeline.rows()[0].at("weights") == 3.0


def test_rows_stand_in_the_order_of_the_starts_and_a_gap_has_a_dash() -> None:
    timeline = StartupTimeline(0.0)
    timeline.take(state("spawned", 1.0, process="Worker_TP1", pid=9), 6.0)
    timeline.take(state("kv", 1.0, process="EngineCore", pid=8), 2.0)
    report = FailureReport(process="X", phase="kv", kind="", message="gone")
    timeline.take(ChildFailure(report=report), 3.0)

    lines = timeline_lines(timeline)
    assert [line.split()[0] for line in lines[1:]] == ["EngineCore", "Worker_TP1"]
    assert lines[2].split()[-1] == "-"
