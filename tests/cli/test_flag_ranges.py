"""Numbers that no machine has are refused at once, with the flag and a number that works."""

import errno
import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vcli.cli.build import parse_bytes, parse_partition
from vcli.cli.environment import Environment
from vcli.cli.errors import explain_crash
from vcli.cli.main import main
from vcli.topology import ConfigError, ExitStatus

_NINES = "9" * 23


def _run(arguments: list[str]) -> tuple[int, str]:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    environment = Environment(
        argv=tuple(arguments), environ={}, cwd=Path.cwd(), stdout=stdout, stderr=stderr
    )
    status = main(environment)
    return status, stderr.buffer.getvalue().decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["topo", "-tp", "99999999999999999"], "tensor_parallel_size=99999999999999999 is above"),
        (["topo", "-tp", _NINES], "tensor_parallel_size"),
        (["topo", "-pp", _NINES], "pipeline_parallel_size"),
        (["topo", "-dp", "10000000"], "data_parallel_size=10000000 is above"),
        (["topo", "-pcp", _NINES], "prefill_context_parallel_size"),
        (["topo", "-dcp", _NINES], "decode_context_parallel_size"),
        (["topo", "-n", _NINES], "nnodes"),
        (["topo", "-tp", "16384", "-dp", "16384"], "268435456 ranks"),
        (["topo", "-dp", "2", "--api-server-count", _NINES], "api_server_count"),
        (["topo", "--num-redundant-experts", _NINES], "num_redundant_experts"),
        (["topo", "--batch", _NINES], "--batch"),
        (["topo", "--context", _NINES], "--context"),
        (["topo", "--max-num-batched-tokens", _NINES], "--max-num-batched-tokens"),
        (["serve", "--dry-run", "--seed", _NINES], "--seed"),
        (["serve", "--dry-run", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["serve", "--dry-run", "--block-size", "99999999999"], "--block-size"),
        (["serve", "--dry-run", "--max-num-batched-tokens", _NINES], "--max-num-batched-tokens"),
        (["serve", "--dry-run", "--max-num-seqs", _NINES], "--max-num-seqs"),
        (["serve", "--dry-run", "--max-model-len", _NINES], "--max-model-len"),
        (["serve", "--dry-run", "--attention-backend", "xyz"], "--attention-backend 'xyz'"),
        (["serve", "--dry-run", "--port", "-1"], "--port -1 must be at least 0"),
        (["serve", "--dry-run", "--port", "65536"], "--port 65536 must be at most 65535"),
        (["serve", "--dry-run", "--kv-cache-memory", "9" * 400], "--kv-cache-memory"),
        (["serve", "--dry-run", "--pp-layer-partition", "²,1"], "no list of numbers"),
    ],
)
def test_a_number_out_of_range_is_refused_at_once(arguments: list[str], said: str) -> None:
    started = time.monotonic()
    status, error = _run(arguments)
    assert status == 2
    assert said in error
    assert error.count("error: ") == 1
    assert "→" in error
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e-9", "0.0001", "0.05", "1e9"])
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("serve --dry-run", "--start-timeout"),
        ("serve --dry-run", "--execute-model-timeout"),
        ("serve --dry-run", "--stall-timeout"),
        ("serve --dry-run", "--shutdown-timeout"),
        ("serve --dry-run", "--join-timeout"),
        ("launch --dry-run", "--join-timeout"),
        ("bench offline", "--start-timeout"),
        ("bench serve", "--request-timeout"),
    ],
)
def test_a_wait_that_nothing_could_meet_is_refused_with_value_limit_and_flag(
    command: str, flag: str, value: str
) -> None:
    status, error = _run([*command.split(), f"{flag}={value}"])
    assert status == 2
    assert f"{flag} {float(value):g} must be " in error
    assert "at least" in error
    assert "604800" in error
    assert f"→ {flag} " in error


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("bench ipc", "--seconds", "1e-9"),
        ("bench ipc", "--seconds", "nan"),
        ("bench ipc", "--seconds", "inf"),
        ("bench ipc", "--pace-ms", "nan"),
        ("bench ipc", "--pace-ms", "-1"),
        ("bench ipc", "--pace-ms", "1e9"),
        ("bench serve", "--request-rate", "1e-9"),
        ("bench serve", "--request-rate", "nan"),
        ("bench serve", "--request-rate", "0"),
        ("doctor", "--watch", "0.0001"),
        ("doctor", "--watch", "1000000"),
    ],
)
def test_a_pace_or_window_out_of_range_is_refused(command: str, flag: str, value: str) -> None:
    status, error = _run([*command.split(), flag, value])
    assert status == 2
    assert flag in error
    assert f"→ {flag} " in error


@pytest.mark.parametrize("command", ["serve --dry-run", "bench offline"])
def test_a_length_that_holds_no_answer_is_refused_where_it_would_be_served(command: str) -> None:
    status, error = _run([*command.split(), "--max-model-len", "1"])
    assert status == 2
    assert "--max-model-len 1 can answer nothing" in error
    assert "at least 2 tokens" in error


def test_topo_plans_a_length_of_one() -> None:
    assert _run(["topo", "--max-model-len", "1"]) == (0, "")


def test_the_largest_deployment_is_planned() -> None:
    status, error = _run(["topo", "-tp", "16384", "--device", "cpu", "--rank", "0"])
    assert (status, error) == (0, "")


@pytest.mark.parametrize("typed", ["9" * 19, "1." + "0" * 30, "٣G"])
def test_what_no_machine_has_is_no_size(typed: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        parse_bytes("--kv-cache-memory", typed)


def test_sizes_are_exact() -> None:
    assert parse_bytes("--kv-cache-memory", "9007199254740993") == 9007199254740993
    assert parse_bytes("--kv-cache-memory", "1.5G") == 3 * 2**29


def test_a_partition_of_endless_digits_is_no_list() -> None:
    with pytest.raises(ConfigError, match="no list of numbers"):
        parse_partition("1" * 5000)


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOSPC, "free some space")],
)
def test_what_the_system_runs_out_of_is_no_bug(number: int, hint: str) -> None:
    told = explain_crash(OSError(number, "exhausted", "/some/file"))
    assert told.exit_status is ExitStatus.UNFIT
    assert hint in told.hint
    assert "/some/file" in told.message


def test_what_fails_while_files_ran_out_is_no_bug_either() -> None:
    failed = RuntimeError("cannot close")
    failed.__context__ = OSError(errno.EMFILE, "Too many open files")
    assert explain_crash(failed).exit_status is ExitStatus.UNFIT
    assert explain_crash(RuntimeError("alone")).exit_status is ExitStatus.BUG


@pytest.mark.process
def test_too_few_open_files_for_the_children_is_unfit() -> None:
    script = (
        "import os, resource\n"
        "from vcli.runtime.process.monitor import ChildMonitor\n"
        "from vcli.topology import UnfitError\n"
        "free = os.dup(0)\n"
        "os.close(free)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))\n"
        "try:\n"
        "    ChildMonitor([], print, print)\n"
        "except UnfitError as error:\n"
        "    print(error.hint)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "ulimit -n" in ran.stdout, ran.stderr
