"""Whatever is named as a model ends in one message at once: no wait, no traceback."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.topo_runs import SMOLLM2
from vcli.cli.environment import Environment
from vcli.cli.main import main

MODELS: dict[str, Callable[[Path], str]] = {
    "pipe.gguf": lambda folder: _pipe(folder / "x.gguf"),
    "pipe as config.json": lambda folder: str(Path(_pipe(folder / "m" / "config.json")).parent),
    "long name": lambda folder: "x" * 256,
    "longer name": lambda folder: "x" * 5000,
    "long hub name": lambda folder: f"org/{'x' * 300}",
    "long gguf": lambda folder: "x" * 300 + ".gguf",
    "nested json": lambda folder: _config(folder, '{"a":' * 100_000 + "1" + "}" * 100_000),
    "endless number": lambda folder: _config(folder, '{"a": ' + "9" * 5000 + "}"),
    "many layers": lambda folder: _config(folder, _changed(num_hidden_layers=10**20)),
    "eps": lambda folder: _config(folder, _changed(rms_norm_eps="x")),
    "vocabulary": lambda folder: _config(folder, _changed(vocab_size=10**12)),
    "nobody's home": lambda folder: "~nobody-of-this-name/model",
}


def _pipe(path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    return str(path)


def _changed(**changes: object) -> str:
    return json.dumps({**SMOLLM2, **changes})


def _config(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize("command", [["topo"], ["serve", "--dry-run"]], ids=["topo", "serve"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_none_is_refused_with_exit_2(
    tmp_path: Path, name: str, command: list[str]
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    status = main(
        Environment(
            argv=(*command, MODELS[name](tmp_path)),
            environ={"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
            cwd=tmp_path,
            stdout=stdout,
            stderr=stderr,
        )
    )
    error = stderr.buffer.getvalue().decode()
    assert status == 2, error
    assert error.count("error: ") == 1
