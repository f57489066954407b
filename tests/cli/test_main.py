"""The command line from outside: exit codes, one message, suggestions, JSON, plain output."""

import io
import json
from pathlib import Path

import pytest

from vcli.cli.build import ModelSettings
from vcli.cli.environment import Environment
from vcli.cli.errors import near_flags
from vcli.cli.main import known_flags, main
from vcli.cli.serve_session import ServeSession
from vcli.runtime.config import DeadlineConfig


class Ran:
    def __init__(self, arguments: list[str], *, encoding: str = "utf-8") -> None:
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        stderr = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        self.status = main(
            Environment(
                argv=tuple(arguments), environ={}, cwd=Path.cwd(), stdout=stdout, stderr=stderr
            )
        )
        self.out = stdout.buffer.getvalue().decode(encoding)
        self.err = stderr.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["topo", "-tp", "0"], "tensor_parallel_size=0 must be at least 1", "-parallel-size 1"),
        (["topo", "-tq", "2"], "no such flag: -tq", "did you mean -tp"),
        (["topo", "--tensor-paralel-size", "2"], "--tensor-paralel-size", "--tensor-parallel-size"),
        (["serve", "--prot", "1"], "no such flag: --prot", "--port"),
        (["doctor", "--watch=2"], "--watch", "see --help for what --watch takes"),
        (["tpo"], "tpo", "--help"),
        (["topo", "-tp", "two"], "two", "--help"),
        (["topo", "--pp-layer-partition", "a,b"], "a,b", "8,8,7,7"),
        (["topo", "-pp", "2", "--pp-layer-partition", "3"], "pp_layer_partition", "leave it out"),
        (["topo", "/no/such/model"], "/no/such/model", "config.json"),
        (["serve", "--dtype", "int3", "--dry-run", "/no/such/model"], "/no/such/model", ""),
        (["serve", "-dp", "2"], "topo plans this; serve does not run it yet", "vcli topo"),
        (["serve", "-pcp", "2"], "topo plans this; serve does not run it yet", ""),
        (["serve", "-tp", "2", "-dcp", "2"], "topo plans this; serve does not run it yet", ""),
        (["serve", "-ep"], "topo plans this; serve does not run it yet", ""),
        (["serve", "--kv-cache-memory", "lots"], "'lots' is no size", "--kv-cache-memory 2G"),
        (["serve", "--load-format", "zip"], "'zip'", "safetensors or dummy"),
        (["serve", "--device", "abacus"], "'abacus'", "auto, cpu or cuda"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs 0", "--max-num-seqs 1"),
        (["serve", "--max-num-batched-tokens", "4"], "--max-num-batched-tokens 4", ""),
        (["serve", "--start-timeout", "-1"], "--start-timeout -1", "600"),
        (["serve", "--execute-model-timeout", "0"], "--execute-model-timeout 0", "300"),
        (["serve", "--stall-timeout", "nan"], "--stall-timeout nan", "--stall-timeout 60"),
        (["serve", "--shutdown-timeout", "-1"], "--shutdown-timeout -1", "--shutdown-timeout 0"),
        (["launch", "--stall-timeout", "inf"], "--stall-timeout inf", "--stall-timeout 60"),
        (
            ["serve", "--distributed-executor-backend", "external_launcher", "-tp", "2"],
            "torchrun or mpirun started; serve and launch start the ranks themselves",
            "--distributed-executor-backend mp",
        ),
        (
            ["launch", "--distributed-executor-backend", "external_launcher", "-tp", "2", "-n=2"],
            "started on each of the 2 nodes; serve and launch start the ranks themselves",
            "--distributed-executor-backend mp",
        ),
    ],
)
def test_bad_input_gives_one_message_a_hint_and_exit_2(
    arguments: list[str], said: str, hint: str
) -> None:
    ran = Ran(arguments)
    assert ran.status == 2
    assert ran.out == ""
    assert said in ran.err
    assert hint in ran.err
    assert ran.err.count("error: ") == 1
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("--prot", ["--port"]),
        ("-port", ["--port"]),
        ("--tp", ["-tp"]),
        ("-tq", ["-tp"]),
        ("--nodes", ["--nnodes"]),
        ("--tensor-paralel-size", ["--tensor-parallel-size"]),
        ("--tensor", ["--tensor-parallel-size"]),
        ("--max-len", ["--max-model-len"]),
        ("--max-model-length", ["--max-model-len"]),
        ("--master", ["--master-addr", "--master-port"]),
        ("--foo", []),
        ("-x", []),
        ("--quantization", []),
        ("--trust-remote-code", []),
        ("--api-key", []),
        ("--chat-template", []),
        ("--enable-lora", []),
    ],
)
def test_only_flags_that_are_really_near_are_suggested(typed: str, near: list[str]) -> None:
    assert near_flags(typed, known_flags(["serve"])) == near


@pytest.mark.parametrize("command", ["serve", "launch"])
def test_deadlines_that_are_typed_are_those_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    built: list[ModelSettings] = []

    def show_plan(session: ServeSession, model: str | None, **_: object) -> int:
        built.append(session.settings)
        return 0

    monkeypatch.setattr(ServeSession, "show_plan", show_plan)
    flags = "--start-timeout 1 --execute-model-timeout 2 --stall-timeout 3.5 --shutdown-timeout 0"
    assert Ran([command, "--dry-run", *flags.split()]).status == 0
    assert Ran([command, "--dry-run"]).status == 0
    typed = DeadlineConfig(start_s=1, execute_model_s=2, stall_s=3.5, drain_s=0)
    assert [settings.deadlines for settings in built] == [typed, DeadlineConfig()]


def test_topo_shows_the_groups_of_tp2_pp4() -> None:
    ran = Ran(["topo", "-tp", "2", "-pp", "4"])
    assert ran.status == 0
    assert "TP    [0,1] [2,3] [4,5] [6,7]" in ran.out
    assert "PP    [0,2,4,6] [1,3,5,7]" in ran.out


def test_topo_json_is_one_document_with_the_contract_s_fields() -> None:
    ran = Ran(["topo", "-tp", "2", "-pp", "4", "--json"])
    document = json.loads(ran.out)
    assert document["schema"] == "vcli.topo/1"
    assert document["exit_code"] == 0
    assert document["groups"]["PP"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert {"world_size", "output_rank", "default_backend", "nodes", "totals", "decisions"} <= set(
        document
    )


def test_an_error_with_json_is_one_document_too() -> None:
    ran = Ran(["topo", "-tp", "0", "--json"])
    document = json.loads(ran.out)
    assert ran.status == 2
    assert document["schema"] == "vcli.error/1"
    assert document["exit_code"] == 2
    assert document["hint"]
    assert ran.err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["topo", "-n=2", "-tp=4", "--json"],
        ["topo", "--nnodes", "2", "--tensor_parallel_size", "4", "--json"],
        ["topo", "--nnodes=2", "--tensor_parallel_size=4", "--json"],
    ],
)
def test_flags_take_equals_signs_and_underscores(arguments: list[str]) -> None:
    ran = Ran(arguments)
    document = json.loads(ran.out)
    assert document["world_size"] == 4
    assert len(document["nodes"]) == 2


def test_an_ascii_terminal_gets_ascii() -> None:
    ran = Ran(["topo", "-tp", "2", "-pp", "2"], encoding="ascii")
    assert ran.status == 0
    assert "pp2 x tp2" in ran.out


def test_version_says_what_is_installed() -> None:
    ran = Ran(["version", "--json"])
    assert json.loads(ran.out)["versions"]["torch"]
    assert Ran(["--version"]).out.startswith("vcli ")


def test_every_command_has_help_with_an_example() -> None:
    for command in ("serve", "topo"):
        ran = Ran([command, "--help"])
        assert ran.status == 0
    assert Ran(["--help"]).status == 0


def test_a_bug_is_exit_7_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr("vcli.cli.commands.topo.layout_view", fails)
    ran = Ran(["topo"])
    assert ran.status == 7
    assert "unforeseen" in ran.err
    assert "VCLI_DEBUG=1" in ran.err
    assert "Traceback" not in ran.err
