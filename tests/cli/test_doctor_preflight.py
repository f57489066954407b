"""The preflight of `serve`: warnings pass, failures refuse with the right exit status, and fast."""

import resource
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fake_host import HEALTHY_HOST, make_context
from vcli.cli.preflight import judge, run_preflight
from vcli.cli.runtime_checks import registry
from vcli.diagnostics import collect_host_facts
from vcli.topology import (
    ConfigError,
    HostFacts,
    NicFacts,
    ParallelConfig,
    TopologyPlan,
    UnfitError,
    plan_topology,
)


def plan(host: HostFacts, **sizes: object) -> TopologyPlan:
    return plan_topology(ParallelConfig(**sizes), host=host)  # type: ignore[arg-type]


def test_this_machine_may_start_and_it_takes_no_time() -> None:
    host = collect_host_facts()
    said: list[str] = []
    begin = time.process_time()
    run_preflight(plan(host), host, environ={}, note=said.append)
    assert time.process_time() - begin < 0.3
    assert [line for line in said if not line.startswith("soft limit")] == []


def test_too_little_memory_refuses_as_unfit_and_names_the_way_out() -> None:
    host = replace(collect_host_facts(), memory_available_bytes=1 << 20)
    with pytest.raises(UnfitError, match="HOST-05") as raised:
        run_preflight(plan(host), host, environ={}, note=print)
    assert raised.value.exit_status == 1
    assert "--no-preflight" in raised.value.hint


def test_a_taken_master_port_is_what_was_typed() -> None:
    host = collect_host_facts()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sizes = plan(host, nnodes=2, pipeline_parallel_size=2, master_port=port)
        with pytest.raises(ConfigError, match=f"port {port}") as raised:
            run_preflight(sizes, host, environ={"GLOO_SOCKET_IFNAME": "lo"}, note=print)
    assert raised.value.exit_status == 2


def test_a_loopback_address_of_node_0_is_refused_with_those_that_others_may_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nics = (NicFacts(name="eth7", addresses=("10.1.2.3",)),)
    monkeypatch.setattr("vcli.diagnostics.network.collect_nics", lambda: nics)
    host = collect_host_facts()
    for node_rank, check in ((0, "NET-01"), (1, "NET-02")):
        sizes = plan(host, nnodes=2, node_rank=node_rank, pipeline_parallel_size=2)
        with pytest.raises(ConfigError, match=check) as raised:
            run_preflight(sizes, host, environ={}, note=print)
        assert "10.1.2.3 (eth7)" in raised.value.hint


def test_a_warning_is_passed_on_and_refuses_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    host = replace(HEALTHY_HOST, kernel="4.18.0")
    judge(registry(), make_context(tmp_path, host=host), note=said.append)
    assert len(said) == 1
    assert said[0].startswith("! HOST-01 Linux 4.18.0")


def test_a_failure_that_does_not_concern_the_plan_refuses_nothing(tmp_path: Path) -> None:
    # Nobody needs /dev/shm on the CPU.
    context = make_context(tmp_path)
    (tmp_path / "dev/shm/.keep").unlink()
    (tmp_path / "dev/shm").rmdir()
    results = judge(registry(), context, note=print)
    by_id = {result.id: result for result in results}
    assert by_id["LIM-01"].status == "fail"


def test_no_slow_check_is_a_preflight() -> None:
    preflight = {check.id for check in registry().checks if check.is_preflight}
    assert "HOST-04" in preflight  # doctor and launch judge the host's name alike
    assert preflight & {"PROC-05", "FIT-03", "PY-05", "HOST-07"} == set()
    assert {"HOST-05", "LIM-05", "LIM-06", "ENV-02", "NET-04"} <= preflight


def test_the_soft_limit_of_open_files_is_raised_for_the_children() -> None:
    host = collect_host_facts()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said: list[str] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        run_preflight(plan(host), host, environ={}, note=said.append)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1088
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert said == ["soft limit of open files raised from 512 to 1088"]
