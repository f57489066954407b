"""What `vcli topo` says of models, and of input that is none."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.topo_runs import H200, model_folder, run_topo, warning_ids


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """A file with a true header whose data is a hole."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for count in shape:
            size *= count
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def test_weight_files_that_hold_another_model_are_told(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    safetensors(folder / "model.safetensors", {"x": [1000, 1000]})

    assert "FIT-03" in warning_ids([str(folder)])


def test_weight_files_that_fit_are_not_told(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    safetensors(folder / "model.safetensors", {"x": [8_030_261, 1000]})

    assert "FIT-03" not in warning_ids([str(folder)])


def test_a_config_file_alone_will_do(tmp_path: Path) -> None:
    model_folder(tmp_path)
    ran = run_topo([str(tmp_path / "config.json"), "-tp", "2", "--json"])

    assert ran.document["memory"]["num_parameters"] == 8_030_261_248


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["--format", "pdf"], "'pdf'", "text, csv"),
        (["--gpu", "h1000"], "h1000", "h100"),
        (["--gpus", "0"], "--gpus 0", "1..64"),
        (["--link", "400GB"], "400GB", "400Gb"),
        (["--link", "fast"], "fast", "400Gb"),
        (["--facts", "/no/such"], "/no/such", "--save-facts"),
        (["--facts", "/no/such", "--gpus", "2"], "--gpus", "leave out"),
        (["--device", "cpu", "--gpu", "h100"], "--device cpu", "leave out"),
        (["--rank", "1"], "no rank 1", "0..0"),
        (["--group", "xp"], "'xp'", "tp, dcp"),
        (["--explain", "ep"], "no EP groups", "--moe"),
        (["--explain", "eplb", "--moe"], "no EPLB groups", "--enable-eplb"),
        (["--rank", "0", "--explain", "tp"], "--rank and --explain", "one of them"),
        (["--json", "--format", "svg"], "--format svg and --json", "one of them"),
        (["--hosts", "a"], "--hosts", "--print-commands"),
        (["--batch", "0"], "--batch 0", "--batch 1"),
        (["--context", "-1"], "--context -1", "--context 1"),
        (["--save-facts", "/no/such/folder/f"], "/no/such/folder/f", "folder"),
        (["x.gguf"], "x.gguf", "path"),
        (["-dp", "2", "-dpr", "2"], "data_parallel_rank=2", "raise"),
    ],
)
def test_bad_input_is_one_message_with_a_hint(arguments: list[str], said: str, hint: str) -> None:
    ran = run_topo(arguments)
    shown = ran.err + ran.out
    assert ran.status == 2, shown
    assert said in shown
    assert hint in shown
    assert "Traceback" not in shown


@pytest.mark.process
@pytest.mark.parametrize("view", [[], ["--suggest"], ["--format", "html"], ["--json"]])
def test_no_view_loads_a_heavy_module(view: list[str], tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    script = (
        "import sys\n"
        "from vcli.cli.main import main\n"
        "from vcli.cli.environment import Environment\n"
        "status = main(Environment.of_this_process())\n"
        "heavy = ('torch', 'transformers', 'fastapi', 'ray', 'numpy', 'rich.table', 'pynvml')\n"
        "print([name for name in heavy if name in sys.modules], status, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script, "topo", str(folder), "-tp", "8", *H200, *view]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stderr.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize(
    ("typed", "value"), [([], "triton"), (["--attention-backend", "flashinfer"], "flashinfer")]
)
def test_attention_backend_is_the_typed_one(tmp_path: Path, typed: list[str], value: str) -> None:
    folder = model_folder(tmp_path / "m")
    decisions = run_topo([str(folder), *H200, *typed, "--json"]).document["decisions"]
    assert {decision["name"]: decision["value"] for decision in decisions}["attention"] == value


def test_a_hub_name_is_read_from_the_cache_or_told_how_to_get_it(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path / "hf")}
    missing = run_topo(["Qwen/Qwen3-8B"], environ=environ, cwd=tmp_path)
    assert missing.status == 2
    assert "Qwen/Qwen3-8B is neither a folder here nor downloaded" in missing.err
    assert "hf download Qwen/Qwen3-8B config.json" in missing.err

    model_folder(tmp_path / "hf/hub/models--Qwen--Qwen3-8B/snapshots/0f1e2d")
    found = run_topo(["Qwen/Qwen3-8B"], environ=environ, cwd=tmp_path)
    assert found.status == 0
    assert "memory Qwen3-8B, " in found.out


@pytest.mark.parametrize("path", ["nope/config.json", "nope/model.gguf"])
def test_a_path_of_a_file_is_no_hub_name(path: str, tmp_path: Path) -> None:
    ran = run_topo([path], cwd=tmp_path)
    assert ran.status == 2
    assert "hf download" not in ran.err
