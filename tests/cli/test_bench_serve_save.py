"""`vcli bench serve --save`: where it cannot go is told before the run; a full disk after it."""

import io
import json
import os
from pathlib import Path

import pytest

from vcli.cli import bench_serve_session
from vcli.cli.environment import Environment
from vcli.cli.main import main
from vcli.runtime.bench.serve import ServeBenchResult


def serve(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    status = main(
        Environment(
            argv=("bench", "serve", "--json", *arguments), environ={}, cwd=cwd,
            stdout=stdout, stderr=stderr,
        )
    )  # fmt: skip
    return status, stdout.getvalue(), stderr.getvalue()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/dev/full", "no ordinary file"),
        ("fifo", "no ordinary file"),
        ("/proc/x", "cannot be written"),
        ("x" * 300, "File name too long"),
        ("", "is a folder"),
        ("no/such/x", "there is no folder"),
    ],
)
def test_what_is_no_ordinary_file_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, said: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(bench_serve_session, "run_serve_bench", None)
    status, out, _ = serve("--save", typed, cwd=tmp_path)
    document = json.loads(out)
    assert (status, document["schema"], document["exit_code"]) == (2, "vcli.error/1", 2)
    assert said in document["message"]
    assert "--save" in document["hint"]


def test_a_file_that_cannot_be_written_after_the_run_leaves_one_document_with_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()

    def run(spec, address, **_):
        folder.rmdir()
        return ServeBenchResult(spec=spec, model="m", prompts="tokens")

    monkeypatch.setattr(bench_serve_session, "run_serve_bench", run)
    status, out, err = serve("--save", "gone/r.json", cwd=tmp_path)
    document = json.loads(out)
    assert (status, document["schema"], document["exit_code"]) == (2, "vcli.bench-serve/1", 2)
    assert "gone/r.json cannot be written" in err
