"""PROC and FIT checks: start method, orphans, sizes against a model, weight files."""

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.check_cases import Case, check_case
from vcli.diagnostics import ModelInput, Status
from vcli.topology import ConfigError, ProcessFacts, model_spec_from_config

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30,
    "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 1536,
    "vocab_size": 49152, "max_position_embeddings": 8192, "dtype": "float32",
}  # fmt: skip
MODEL = ModelInput(
    typed="m", folder=Path("m"), config=CONFIG, spec=model_spec_from_config(CONFIG, source="m")
)
BROKEN = ModelInput(typed="m", folder=Path("m"), problem=ConfigError("no such", hint="other one"))


def process(**facts: Any) -> Mapping[str, Any]:
    return {"process": ProcessFacts(**facts), "plan_with": {"process": ProcessFacts(**facts)}}


def checkpoint(**changes: Any):
    """A folder with two complete weight files and their index, changed as told."""

    def prepare(folder: Path) -> Mapping[str, Any]:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        if changes.get("tokenizer", True):
            (model / "tokenizer.json").write_text("{}")
        weight_map = {}
        for name in ("a", "b"):
            header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})
            data = len(header).to_bytes(8, "little") + header.encode() + b"\0" * 16
            (model / f"{name}.safetensors").write_bytes(data)
            weight_map[name] = f"{name}.safetensors"
        index = {"weight_map": weight_map}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        change = changes.get("change")
        if change:
            change(model)
        return {"model": ModelInput(typed="m", folder=model, config=CONFIG, spec=MODEL.spec)}

    return prepare


def cut_both(model: Path) -> None:
    for name in ("a", "b"):
        path = model / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:-4])


def pointer(model: Path) -> None:
    (model / "b.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")


def ticking(seconds: float) -> Any:
    """A clock that is so much later at each look."""
    times = count(0.0, seconds)
    return lambda: next(times)


CASES = [
    Case(id="PROC-06", status=SKIP, says="no model was named"),
    Case(id="PROC-06", status=PASS, says="loading takes about", prepare=checkpoint()),
    Case(
        id="PROC-06",
        status=WARN,
        says="about 1000 s: ",
        remedy="--start-timeout 1500, or copy the model to a local disk: /",
        prepare=checkpoint(),
        more={"clock": ticking(250.0)},
    ),
    Case(id="PROC-01", status=PASS),
    Case(id="PROC-01", status=PASS, says="spawn: ", config={"start_method": "spawn"}),
    Case(
        id="PROC-01",
        status=WARN,
        says="threads are alive",
        remedy="--start-method spawn",
        config={"start_method": "fork"},
        more=process(num_threads=4),
    ),
    Case(id="PROC-02", status=PASS, says="untouched"),
    Case(
        id="PROC-02",
        status=FAIL,
        says="CUDA is in use",
        remedy="--start-method spawn",
        config={"start_method": "fork"},
        more=process(cuda_initialized=True),
    ),
    Case(id="PROC-02", status=PASS, says="does not matter", more=process(cuda_initialized=True)),
    Case(id="PROC-03", status=PASS, says="1 thread"),
    Case(
        id="PROC-03",
        status=WARN,
        says="3 threads",
        config={"start_method": "fork"},
        more=process(num_threads=3),
    ),
    Case(id="PROC-04", status=PASS, says="guarded"),
    Case(
        id="PROC-04",
        status=FAIL,
        says="no guard",
        config={"start_method": "spawn"},
        more=process(main_has_guard=False),
    ),
    Case(id="PROC-04", status=SKIP, more=process(main_has_guard=None)),
    Case(id="FIT-01", status=SKIP, says="no model"),
    Case(id="FIT-01", status=PASS, says="LlamaForCausalLM, 30 layers", more={"model": MODEL}),
    Case(id="FIT-01", status=FAIL, remedy="other one", more={"model": BROKEN}),
    Case(
        id="FIT-02",
        status=PASS,
        says="16 heads, 4 KV heads",
        config={"tp": 4},
        more={"model": MODEL},
    ),
    Case(
        id="FIT-02",
        status=FAIL,
        says="4 KV heads on tensor parallel size 9",
        remedy="-tp 3 -pp 3",
        config={"tp": 9},
        more={"model": MODEL},
    ),
    Case(id="FIT-02", status=FAIL, config={"pp": 31}, more={"model": MODEL}),
    Case(id="FIT-03", status=SKIP),
    Case(id="FIT-03", status=PASS, says="2 weight files, 32 B", prepare=checkpoint()),
    Case(
        id="FIT-03", status=FAIL, says="b.safetensors is cut", prepare=checkpoint(change=cut_both)
    ),
    Case(
        id="FIT-03",
        status=FAIL,
        says="git-lfs pointer",
        remedy="git lfs pull",
        prepare=checkpoint(change=pointer),
    ),
    Case(
        id="FIT-03",
        status=FAIL,
        says="lacks a.safetensors",
        prepare=checkpoint(change=lambda model: (model / "a.safetensors").unlink()),
    ),
    Case(id="FIT-07", status=SKIP),
    Case(id="FIT-07", status=PASS, prepare=checkpoint()),
    Case(id="FIT-07", status=FAIL, says="tokenizer.json", prepare=checkpoint(tokenizer=False)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_sizes_that_fit_are_offered_for_the_same_number_of_ranks(tmp_path: Path) -> None:
    case = Case(id="FIT-02", status=FAIL, config={"tp": 9}, more={"model": MODEL})
    result = check_case(case, tmp_path)
    assert result.expected == "one of: -tp 3 -pp 3, -tp 1 -pp 9"


@pytest.mark.process
def test_the_workers_of_a_killed_engine_end_at_once(tmp_path: Path) -> None:
    check_case(Case(id="PROC-05", status=PASS, says="2 workers gone"), tmp_path)


def test_children_that_do_not_start_are_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vcli.runtime.errors import FailureReport, StartupError
    from vcli.runtime.process import orphan_probe

    def refuse() -> None:
        raise StartupError(
            FailureReport(kind="StartTimeout", message="too busy", process="x", phase="spawned")
        )

    monkeypatch.setattr(orphan_probe, "run_orphan_probe", refuse)
    check_case(Case(id="PROC-05", status=Status.UNKNOWN, says="did not start"), tmp_path)


@pytest.mark.process
def test_survivors_fail_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A deadline that nobody can keep.
    from vcli.runtime.process import orphan_probe

    real = orphan_probe.run_orphan_probe
    monkeypatch.setattr(orphan_probe, "run_orphan_probe", lambda: real(end_deadline_s=-1.0))
    result = check_case(Case(id="PROC-05", status=FAIL, says="2 of 2 workers lived on"), tmp_path)
    for pid in result.remedy.removeprefix("kill ").split(";")[0].split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or ") Z " in state.read_text()


@pytest.mark.process
def test_deep_measures_the_import_of_torch(tmp_path: Path) -> None:
    more = {"is_deep": True, "clock": ticking(20.0)}
    says = "about 20 s: import of torch 20.0 s"
    check_case(Case(id="PROC-06", status=PASS, says=says, more=more), tmp_path)


def test_weights_that_cannot_be_read_are_no_verdict(tmp_path: Path) -> None:
    def empty(model: Path) -> None:
        for path in model.glob("*.safetensors"):
            path.write_bytes(b"")

    case = Case(
        id="PROC-06", status=Status.UNKNOWN, says="is empty", prepare=checkpoint(change=empty)
    )
    check_case(case, tmp_path)
