"""Files that `vcli doctor` writes: where they cannot go is told before anything is checked."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from vcli.cli.environment import Environment
from vcli.cli.main import main


@pytest.mark.parametrize("flag", ["--save-facts", "--save-baseline", "--bundle", "--html"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    stdout = io.StringIO()
    status = main(
        Environment(
            argv=("doctor", "lim-01", flag, "pipe", "--json"), environ={}, cwd=tmp_path,
            stdout=stdout, stderr=io.StringIO(),
        )
    )  # fmt: skip
    document = json.loads(stdout.getvalue())
    assert (status, document["schema"], document["exit_code"]) == (2, "vcli.error/1", 2)
    assert "no ordinary file" in document["message"]
    assert flag in document["hint"]


@pytest.mark.parametrize(
    ("name", "status"), [("b.tgz", 0), ("b.tar.gz", 0), ("b.zip", 2), ("b", 2)]
)
def test_a_bundle_is_what_its_name_says(tmp_path: Path, name: str, status: int) -> None:
    stderr = io.StringIO()
    ended = main(
        Environment(
            argv=("doctor", "lim-08", "--bundle", name), environ={}, cwd=tmp_path,
            stdout=io.StringIO(), stderr=stderr,
        )
    )  # fmt: skip
    assert ended == status
    if status:
        assert f"--bundle {name}: a bundle is a .tgz or .tar.gz" in stderr.getvalue()
        assert "--bundle b.tgz" in stderr.getvalue()
        assert list(tmp_path.iterdir()) == []
    else:
        with tarfile.open(tmp_path / name) as archive:
            assert "b/report.json" in archive.getnames()
