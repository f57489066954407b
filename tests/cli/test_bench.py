"""`vcli bench ipc` from outside."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vcli.cli.environment import Environment
from vcli.cli.main import main


def run(*arguments):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    status = main(
        Environment(argv=arguments, environ={}, cwd=Path.cwd(), stdout=stdout, stderr=stderr)
    )
    return status, stdout.buffer.getvalue().decode(), stderr.buffer.getvalue().decode()


@pytest.mark.process
def test_json_has_the_host_the_request_and_a_row_for_each_pair():
    sizes = ("--readers", "1,2", "--payload", "100,2K")
    status, out, err = run("bench", "ipc", *sizes, "--seconds", "0.02", "--kills", "2", "--json")
    assert status == 0, err
    document = json.loads(out)
    assert document["schema"] == "vcli.bench.ipc/1"
    assert document["exit_code"] == 0
    assert document["host"]["num_cpus"] >= 1
    assert document["spec"]["payloads_bytes"] == [100, 2048]
    pairs = [(row["readers"], row["payload_bytes"]) for row in document["rows"]]
    assert pairs == [(1, 100), (1, 2048), (2, 100), (2, 2048)]
    assert document["rows"][0]["round_trip_us"]["p50"] > 0
    assert [row["killed"] for row in document["deaths"]] == ["reader", "writer"]
    for row in document["deaths"]:
        named = row["named_ms"]
        assert named["count"] == 2
        assert 0 < named["min"] <= named["p50"] <= named["max"]


@pytest.mark.process
@pytest.mark.parametrize("kills", [0, 1])
def test_the_table_has_a_line_for_each_row_and_for_each_end_that_was_killed(kills):
    sizes = ("--readers", "1", "--payload", "1M", "--seconds", "0.02", "--kills", str(kills))
    status, out, _ = run("bench", "ipc", *sizes)
    assert status == 0
    header, row, *deaths = out.splitlines()[3:]
    assert header.split()[:2] == ["readers", "payload"]
    assert row.startswith("1        1.0 MiB")
    firsts = [line.split()[:1] for line in deaths]
    assert firsts == ([[], ["killed"], ["reader,"], ["writer,"]] if kills else [])


@pytest.mark.process
def test_ctrl_c_prints_what_is_known_and_leaves_with_130():
    command = [sys.executable, "-m", "vcli.cli", "bench", "ipc", "--readers", "1"]
    child = subprocess.Popen(
        [*command, "--payload", "1,2,3,4,5,6,7,8,9", "--seconds", "0.3", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr.readline() == "1 of 9 measured\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "stopped" in err
    assert "Traceback" not in err
    document = json.loads(out)
    assert document["exit_code"] == 130
    assert 1 <= len(document["rows"]) < 9


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--readers", "two"), ("--readers", "0"), ("--payload", "1X"), ("--payload", ""),
     ("--seconds", "-1"), ("--kills", "-1")],
)  # fmt: skip
def test_a_wrong_number_is_told_with_its_flag_and_exit_2(flag, value):
    status, out, err = run("bench", "ipc", flag, value)
    assert (status, out) == (2, "")
    assert flag in err


def test_a_misspelt_flag_of_the_inner_command_gets_a_suggestion():
    status, _, err = run("bench", "ipc", "--reades", "2")
    assert status == 2
    assert "did you mean --readers" in err
