"""Where the job token comes from, and which ones are none."""

from pathlib import Path

import pytest

from vcli.runtime.launch.token import read_job_token
from vcli.topology.errors import ConfigError


def test_the_file_counts_before_the_variable_and_space_around_it_does_not(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  of the file\n\n")
    environ = {"VCLI_JOB_TOKEN": " of the variable\n"}
    assert read_job_token(str(file), environ) == "of the file"
    assert read_job_token(None, environ) == "of the variable"
    assert read_job_token(None, {}) is None


@pytest.mark.parametrize("text", ["", "\n", "short"])
def test_an_empty_or_short_token_is_refused_wherever_it_stands(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError, match="characters"):
        read_job_token(str(file), {})
    with pytest.raises(ConfigError, match="VCLI_JOB_TOKEN"):
        read_job_token(None, {"VCLI_JOB_TOKEN": text})


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere can't be read: No such file"):
        read_job_token(str(tmp_path / "nowhere"), {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 10)
    with pytest.raises(ConfigError, match="no text"):
        read_job_token(str(tmp_path / "binary"), {})
