"""A child's environment, computed without touching one."""

from pathlib import Path

import pytest

from vcli.runtime.process.environ import (
    RANK_DEFAULTS,
    UNTOUCHABLE,
    bootstrap_environ,
    first_number,
    interface_environ,
    one_host_environ,
    restore_environ,
    worker_environ,
)


@pytest.mark.parametrize("name", UNTOUCHABLE)
def test_multicast_switch_of_the_user_is_never_replaced(name: str) -> None:
    environ = worker_environ({name: "0"}, additions={name: "1"})
    assert environ[name] == "0"


def test_switches_that_the_user_left_alone_are_not_invented() -> None:
    assert worker_environ({"A": "1"}) == {"A": "1"}


def test_thread_count_of_the_plan_is_used_when_the_user_set_none() -> None:
    assert worker_environ({}, omp_num_threads=3)["OMP_NUM_THREADS"] == "3"


def test_thread_count_of_the_user_wins() -> None:
    environ = worker_environ({"OMP_NUM_THREADS": "7"}, omp_num_threads=3)
    assert environ["OMP_NUM_THREADS"] == "7"


def test_additions_replace_what_the_parent_has() -> None:
    assert worker_environ({"A": "1", "B": "2"}, additions={"A": "3"}) == {"A": "3", "B": "2"}


def test_base_is_not_changed() -> None:
    base = {"A": "1"}
    worker_environ(base, additions={"A": "2"}, omp_num_threads=1)
    assert base == {"A": "1"}


@pytest.mark.parametrize("base", [{}, {"PYTHONPATH": "/mine"}, {"PYTHONPATH": ""}])
def test_import_path_is_lent_for_the_start_only(base: dict[str, str]) -> None:
    lent = bootstrap_environ(base, ["", "lib", "/abs"], Path("/home"))
    assert lent["PYTHONPATH"] == "/home:/home/lib:/abs"
    assert restore_environ(lent) == base


def test_interface_of_gloo_is_a_default_that_the_user_overrides() -> None:
    additions = one_host_environ()
    assert additions == {"GLOO_SOCKET_IFNAME": "lo", **RANK_DEFAULTS}
    assert worker_environ({}, additions=additions)["GLOO_SOCKET_IFNAME"] == "lo"
    mine = {"GLOO_SOCKET_IFNAME": "eth1"}
    assert worker_environ(mine, additions=additions)["GLOO_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize(
    ("value", "number"), [("4", 4), ("4,2", 4), (" 3 ,1", 3), ("", None), ("0", None), ("x", None)]
)
def test_first_number_of_omp_num_threads(value: str, number: int | None) -> None:
    assert first_number(value) == number


def test_interface_towards_other_nodes_is_a_default_that_the_user_overrides() -> None:
    additions = interface_environ("eth0")
    assert additions == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        **RANK_DEFAULTS,
    }
    mine = {"NCCL_SOCKET_IFNAME": "ib0"}
    environ = worker_environ(mine, additions=additions)
    assert environ == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "ib0",
        **RANK_DEFAULTS,
    }
    assert interface_environ("") == RANK_DEFAULTS


def test_torch_makes_no_multicast_object_unless_the_user_says_so() -> None:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    for additions in (one_host_environ(), interface_environ("eth0")):
        assert worker_environ({}, additions=additions)[name] == "1"
        assert worker_environ({name: "0"}, additions=additions)[name] == "0"
