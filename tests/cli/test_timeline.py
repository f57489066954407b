"""The table of `vcli serve --timeline`."""

import io
import os
import time
from pathlib import Path

from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.views.startup import StartupView
from vcli.cli.views.timeline import STATES, StartupTimeline, timeline_lines
from vcli.runtime.errors import FailureReport
from vcli.runtime.messages import ChildFailure, ChildReady, ChildState
from vcli.topology import ParallelConfig, plan_topology


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


def test_a_worker_that_takes_calls_is_ready_after_the_last_thing_it_is_called_to_do() -> None:
    timeline = StartupTimeline(0.0)
    ready = ChildReady(process="Worker_TP0", seconds=2.0, pid=7)
    timeline.take(state("weights", 1.9), 1.9)
    timeline.take(ready, 2.0)
    assert timeline.rows()[0].at("ready") == 2.0
    timeline.take(state("kv", 3.0), 3.0)
    timeline.take(state("warm-up", 4.0), 4.0)

    (row,) = timeline.rows()
    assert (row.at("kv"), row.at("warm-up"), row.at("ready")) == (3.0, 4.0, 4.0)
    times = [row.at(name) for name in STATES]
    assert sorted(filter(None, times)) == list(filter(None, times))


def test_rows_stand_in_the_order_of_the_starts_and_a_gap_has_a_dash() -> None:
    timeline = StartupTimeline(0.0)
    timeline.take(state("spawned", 1.0, process="Worker_TP1", pid=9), 6.0)
    timeline.take(state("kv", 1.0, process="EngineCore", pid=8), 2.0)
    report = FailureReport(process="X", phase="kv", kind="", message="gone")
    timeline.take(ChildFailure(report=report), 3.0)

    lines = timeline_lines(timeline)
    assert [line.split()[0] for line in lines[1:]] == ["EngineCore", "Worker_TP1"]
    assert lines[2].split()[-1] == "-"


def view_of(stderr: io.StringIO, *, has_timeline: bool = True, age_s: float = 0.0) -> StartupView:
    """The view of a command that began `age_s` ago."""
    environment = Environment(
        argv=(),
        environ={},
        cwd=Path("/"),
        stdout=io.StringIO(),
        stderr=stderr,
        started_s=time.monotonic() - age_s,
    )
    plan = plan_topology(ParallelConfig())
    return StartupView(Output(environment), plan, "demo", has_timeline=has_timeline)


def tables_in(text: str) -> list[dict[str, dict[str, str]]]:
    """The cells of each table that was printed, by process and column."""
    tables: list[dict[str, dict[str, str]]] = []
    columns: list[str] = []
    for line in text.splitlines():
        cells = line.replace("first token", "first_token").split()
        if cells[:2] == ["process", "pid"]:
            columns = [cell for cell in cells if cell not in {f"t{n}" for n in range(11)}]
            tables.append({})
        elif len(cells) == len(columns) and cells[1].isdigit():
            tables[-1][cells[0]] = dict(zip(columns, cells, strict=True))
    return tables


def test_first_token_is_t10() -> None:
    assert [f"t{index} {state}" for index, state in enumerate(STATES)][-2:] == [
        "t9 ready",
        "t10 first token",
    ]


def test_table_has_the_api_server_and_after_the_first_token_that_too() -> None:
    stderr = io.StringIO()
    view = view_of(stderr, age_s=5.0)
    view.on_message(state("imported", 4.0, process="ForkServer", pid=8))
    view.on_serving("http://127.0.0.1:8000", 64)
    view.on_first_token()
    ready, complete = tables_in(stderr.getvalue())

    assert list(ready) == ["ApiServer", "ForkServer"]
    # The fork server is older than the view: all times count from the start of the command.
    assert 1.0 <= float(ready["ForkServer"]["started"]) < 5.0
    assert float(ready["ForkServer"]["imported"]) >= 5.0
    server = complete["ApiServer"]
    assert (server["pid"], server["started"]) == (str(os.getpid()), "0.00")
    assert 5.0 <= float(server["ready"]) <= float(server["first_token"])
    assert "first_token" not in ready["ApiServer"]
    assert complete["ForkServer"]["first_token"] == "-"


def test_without_the_flag_nothing_is_said_of_times() -> None:
    stderr = io.StringIO()
    view = view_of(stderr, has_timeline=False)
    view.on_serving("http://127.0.0.1:8000", 64)
    view.on_first_token()
    assert tables_in(stderr.getvalue()) == []
