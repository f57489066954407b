"""ENV checks: misspelt names, interface rules, left-over switches, proxies, launcher variables."""

from pathlib import Path

import pytest

from tests.support.check_cases import Case, check_case
from vcli.diagnostics import Dialect, Status
from vcli.diagnostics.checks.environment import edit_distance
from vcli.diagnostics.checks.variables import KNOWN_VARIABLES
from vcli.diagnostics.network import parse_interface_rule

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP
TWO_NODES = {"nnodes": 2, "tp": 2, "master_addr": "10.0.0.9"}

CASES = [
    Case(id="ENV-01", status=PASS, environ={"NCCL_DEBUG": "INFO", "NCCL_BRAND_NEW_THING": "1"}),
    Case(
        id="ENV-01",
        status=WARN,
        says="NCCL_SOCKET_IFNAM (did you mean NCCL_SOCKET_IFNAME?)",
        remedy="export NCCL_SOCKET_IFNAME=…; unset NCCL_SOCKET_IFNAM",
        environ={"NCCL_SOCKET_IFNAM": "eth0"},
    ),
    Case(id="ENV-01", status=WARN, says="NCLL_DEBUG", environ={"NCLL_DEBUG": "INFO"}),
    Case(id="ENV-01", status=WARN, says="VCLI_HOMR", environ={"VCLI_HOMR": "/x"}),
    Case(id="ENV-02", status=PASS, says="none is set"),
    Case(id="ENV-02", status=PASS, says="→ eth0", environ={"NCCL_SOCKET_IFNAME": "^lo,docker"}),
    Case(
        id="ENV-02",
        status=FAIL,
        says="NCCL_SOCKET_IFNAME=ib fits none of lo, eth0",
        remedy="export NCCL_SOCKET_IFNAME=eth0",
        environ={"NCCL_SOCKET_IFNAME": "ib"},
    ),
    Case(id="ENV-02", status=FAIL, environ={"NCCL_SOCKET_IFNAME": "=eth"}),
    Case(
        id="ENV-02",
        status=FAIL,
        says="GLOO_SOCKET_IFNAME names eno1",
        remedy="docker run -e GLOO_SOCKET_IFNAME=eth0",
        environ={"GLOO_SOCKET_IFNAME": "eth0,eno1"},
        more={"dialect": Dialect.DOCKER},
    ),
    Case(
        id="ENV-02",
        status=WARN,
        says="leaves only loopback",
        environ={"NCCL_SOCKET_IFNAME": "lo"},
        config=TWO_NODES,
    ),
    Case(id="ENV-02", status=PASS, environ={"NCCL_SOCKET_IFNAME": "lo"}),
    Case(id="ENV-03", status=PASS, environ={"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "0"}),
    Case(
        id="ENV-03",
        status=WARN,
        says="CUDA_LAUNCH_BLOCKING=1 (waits for every kernel)",
        remedy="unset CUDA_LAUNCH_BLOCKING NCCL_DEBUG",
        environ={"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "trace"},
    ),
    Case(id="ENV-04", status=PASS, says="no proxy"),
    Case(id="ENV-04", status=PASS, says="one node", environ={"http_proxy": "http://p:3128"}),
    Case(
        id="ENV-04",
        status=WARN,
        says="no_proxy lacks 10.0.0.9",
        remedy="export no_proxy=.corp,10.0.0.9",
        environ={"http_proxy": "http://p:3128", "no_proxy": ".corp"},
        config=TWO_NODES,
    ),
    Case(
        id="ENV-04",
        status=PASS,
        says="covers",
        environ={"http_proxy": "http://p:3128", "NO_PROXY": "10.0.0.9"},
        config=TWO_NODES,
    ),
    Case(id="ENV-05", status=SKIP),
    Case(
        id="ENV-05",
        status=PASS,
        environ={"SLURM_NNODES": "2", "SLURM_NODEID": "0"},
        config=TWO_NODES,
    ),
    Case(
        id="ENV-05",
        status=WARN,
        says="SLURM_NNODES=4 but --nnodes is 2",
        remedy="--nnodes 4 --master-addr 10.0.0.1",
        environ={"SLURM_NNODES": "4", "MASTER_ADDR": "10.0.0.1"},
        config=TWO_NODES,
    ),
    Case(id="ENV-05", status=WARN, says="the plan has 1 ranks", environ={"WORLD_SIZE": "8"}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.parametrize(
    ("value", "has_prefixes", "matched"),
    [
        ("eth", True, ("eth0", "eth1")),
        ("=eth0", True, ("eth0",)),
        ("^eth", True, ("lo", "ib0")),
        ("^=eth0", True, ("lo", "eth1", "ib0")),
        ("eth0,ib", True, ("eth0", "ib0")),
        ("eth0", False, ("eth0",)),
        ("eth", False, ()),
    ],
)
def test_interface_grammar(value: str, has_prefixes: bool, matched: tuple[str, ...]) -> None:
    rule = parse_interface_rule(value, has_prefixes=has_prefixes)
    assert rule.matches(("lo", "eth0", "eth1", "ib0")) == matched


def test_no_known_variable_is_taken_for_a_misspelling_of_another() -> None:
    assert {"NCCL_DEBUG", "NCCL_NVLS_ENABLE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} <= KNOWN_VARIABLES


def test_edit_distance_counts_letters() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == 3
