"""`vcli launch` under a scheduler: whose values reach the plan, and what is said about them."""

import io
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from vcli.cli.environment import Environment
from vcli.cli.main import main
from vcli.cli.node_session import command_for_node
from vcli.cli.serve_session import ServeSession

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[3-4]",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "gpu3",
    "MASTER_PORT": "2000",
}


class Launched:
    """A command up to its plan, which is not made."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        arguments: str,
        environ: Mapping[str, str],
        *,
        is_dry: bool = True,
    ) -> None:
        sessions: list[ServeSession] = []

        def keep(session: ServeSession, model: str | None, **_: object) -> int:
            sessions.append(session)
            return 0

        monkeypatch.setattr(ServeSession, "show_plan", keep)
        monkeypatch.setattr(ServeSession, "run", keep)
        stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        self.status = main(
            Environment(
                argv=(*arguments.split(), *(["--dry-run"] if is_dry else [])),
                environ=environ,
                cwd=Path.cwd(),
                stdout=io.StringIO(),
                stderr=stderr,
            )
        )
        self.said = stderr.buffer.getvalue().decode()
        self.session = sessions[0] if sessions else None

    @property
    def place(self) -> tuple[int, int, str, int]:
        assert self.session is not None, self.said
        sizes = self.session.parallel
        return sizes.nnodes, sizes.node_rank, sizes.master_addr, sizes.master_port

    def command_for(self, node_rank: int) -> str:
        assert self.session is not None, self.said
        return command_for_node(self.session.nodes.environment.argv, node_rank)


def test_the_variables_reach_the_plan_and_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch, "launch -tp 2", SLURM)

    assert launched.place == (2, 1, "gpu3", 29501)
    assert launched.said == (
        "place  nnodes 2 (SLURM_STEP_NUM_NODES) · node-rank 1 (SLURM_NODEID) · "
        "master-addr gpu3 (SLURM_STEP_NODELIST)\n"
    )


def test_the_port_that_torchrun_leaves_reaches_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Launched(monkeypatch, "launch -tp 2", TORCHRUN).place == (2, 0, "gpu3", 2000)


def test_typed_flags_win_also_with_their_default_value(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch, "launch -tp 2 -r 0", SLURM)

    assert launched.place == (2, 0, "gpu3", 29501)
    assert "! SLURM_NODEID=1 but --node-rank is 0: the flag wins [ENV-05]\n" in launched.said


def test_flags_alone_say_nothing_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch, "launch -tp 2 -n 2 -r 1 --master-addr 10.0.0.1", SLURM)

    assert launched.place == (2, 1, "10.0.0.1", 29501)
    assert launched.said == ""


def test_the_line_for_another_node_holds_outside_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = Launched(monkeypatch, "launch -tp 2", SLURM)

    assert launched.command_for(0) == (
        "vcli launch --nnodes 2 --node-rank 0 --master-addr gpu3 -tp 2 --dry-run"
    )


@pytest.mark.parametrize("environ", [SLURM, TORCHRUN], ids=["slurm", "torchrun"])
def test_serve_is_as_it_is_typed(
    monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str]
) -> None:
    launched = Launched(monkeypatch, "serve -tp 2", environ)

    assert launched.place == (1, 0, "127.0.0.1", 29501)
    assert launched.said == ""


def test_a_bad_variable_is_one_message_and_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch, "launch -tp 2", {**SLURM, "SLURM_NODEID": "7"})

    assert launched.status == 2
    assert launched.said == (
        "error: SLURM_NODEID='7' must be a number in 0..1\n"
        "  → mend SLURM_NODEID, or type --node-rank, which goes before it\n"
    )


class Names:
    """A resolver that knows the name only from the given look-up on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known_after: int) -> None:
        self.asked: list[str] = []
        self.slept_s = 0.0
        self._known_after = known_after
        monkeypatch.setattr("vcli.cli.commands.launch.socket.getaddrinfo", self._look_up)
        monkeypatch.setattr("vcli.cli.commands.launch.time.sleep", self._sleep)
        monkeypatch.setattr("vcli.cli.commands.launch.time.monotonic", lambda: self.slept_s)

    def _look_up(self, host: str, *_: object, **__: object) -> None:
        self.asked.append(host)
        if len(self.asked) <= self._known_after:
            raise socket.gaierror("Name or service not known")

    def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds


def test_a_name_of_a_scheduler_that_is_not_known_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch, known_after=3)
    launched = Launched(monkeypatch, "launch -tp 2", SLURM, is_dry=False)
    assert launched.place[2] == "gpu3"
    assert names.asked == ["gpu3"] * 4
    assert launched.said.count("gpu3 does not resolve yet; asking again for 30 s") == 1


def test_a_name_that_stays_unknown_is_left_to_what_fails_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch, known_after=10**6)
    assert Launched(monkeypatch, "launch -tp 2", SLURM, is_dry=False).session is not None
    assert names.slept_s == 30


def test_a_typed_name_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, known_after=10**6)
    arguments = "launch -tp 2 --master-addr gpu9"
    assert Launched(monkeypatch, arguments, SLURM, is_dry=False).place[2] == "gpu9"
    assert names.asked == []
