"""What two hosts do when a process, a cable or a whole host is gone, or somebody stops one."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.job import VCLI, Job, Node, job_of
from tests.support.lab import lab_of, why_no_lab

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_lab()), reason=why_no_lab() or "there is a lab"),
]

PROMPT = [5, 6, 7, 8, 9]
FLAGS = ("-tp", "2", "-pp", "2")
#: In this state all ranks have been started and none is ready.
LOADING = "imported"


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Iterator[Job]:
    with lab_of(2, tmp_path) as lab, job_of(lab.hosts, tmp_path, model) as running:
        yield running


def wait_phase(job: Job, phase: str) -> tuple[Node, Node]:
    """Start the job and wait until it loads or serves."""
    leader, follower = job.start_all(*FLAGS)
    if phase == "loading":
        leader.wait_line(rf"ranks 0-3 {LOADING}")
    else:
        job.ask(leader.wait_serving(), PROMPT)
        follower.wait_line("serves at")
    return leader, follower


def check_end(job: Job, nodes: tuple[Node, ...], status: int, since: float) -> None:
    """Every node has the status and one error; nothing is left within ten seconds."""
    for node in nodes:
        assert node.wait_exit(15) == status, node.output
        assert len(node.errors) == 1, node.output
        assert "Traceback" not in node.output
    job.wait_nothing_left(10, since=since)


PHASES = [pytest.param("loading", 5, id="loading"), pytest.param("serving", 6, id="serving")]


@pytest.mark.parametrize(("phase", "status"), PHASES)
@pytest.mark.parametrize(
    ("host", "title"), [(0, "Worker_PP0_TP1"), (1, "Worker_PP1_TP0"), (0, "EngineCore")]
)
def test_a_killed_process_is_named_on_both_nodes(
    job: Job, host: int, title: str, phase: str, status: int
) -> None:
    nodes = wait_phase(job, phase)
    pid = job.hosts[host].pid_of(title)
    named = f"pid {job.hosts[host].own_pid(pid)} on host{host}"
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    check_end(job, nodes, status, begun)
    for node in nodes:
        assert title in node.errors[0]
        assert named in node.errors[0]
        assert "SIGKILL" in node.errors[0]


def test_killed_fork_servers_end_nothing(job: Job) -> None:
    leader, follower = wait_phase(job, "serving")
    for host in job.hosts:
        os.kill(host.pid_of("ForkServer"), signal.SIGKILL)
    for node in (leader, follower):
        node.wait_line("fork server .* killed by SIGKILL: running processes live on")
    assert job.ask(leader.wait_serving(), PROMPT)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(("phase", "status"), PHASES)
@pytest.mark.parametrize("host", [0, 1])
def test_a_killed_launcher_is_named_on_the_other_node(
    job: Job, host: int, phase: str, status: int
) -> None:
    nodes = wait_phase(job, phase)
    begun = time.monotonic()
    job.nodes[host].stop(signal.SIGKILL)
    check_end(job, (nodes[1 - host],), status, begun)
    assert f"node{host}" in nodes[1 - host].errors[0]
    assert f"on host{host}" in nodes[1 - host].errors[0]
    assert "its connection was closed" in nodes[1 - host].errors[0]


@pytest.mark.parametrize(("phase", "status"), PHASES)
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_crashes_is_named_on_the_other(
    job: Job, host: int, phase: str, status: int
) -> None:
    nodes = wait_phase(job, phase)
    begun = time.monotonic()
    job.hosts[host].crash()
    check_end(job, (nodes[1 - host],), status, begun)
    assert f"node{host}" in nodes[1 - host].errors[0]


@pytest.mark.parametrize(("phase", "status"), PHASES)
def test_a_pulled_cable_is_found_on_both_sides(job: Job, phase: str, status: int) -> None:
    nodes = wait_phase(job, phase)
    begun = time.monotonic()
    job.hosts[1].unplug()
    check_end(job, nodes, status, begun)
    for node, other in zip(nodes, (1, 0), strict=True):
        assert f"node{other}" in node.errors[0]
        assert "no sign of life" in node.errors[0]


@pytest.mark.parametrize("host", [0, 1])
def test_a_rank_that_keeps_others_waiting_is_named_with_its_node(job: Job, host: int) -> None:
    leader, _ = job.start_all("-tp", "2", "--stall-timeout", "1")
    url = leader.wait_serving()
    job.ask(url, PROMPT)
    pid = job.hosts[host].pid_of(f"Worker_TP{host}")
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(job.ask, url, PROMPT)
        try:
            line = leader.wait_line("runs for over 1 s")
            seen = (
                job.hosts[0].run(*VCLI, "doctor", "--instance", "latest", "--json") if host else ""
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.result(60)["usage"]["completion_tokens"] == 8
    named = rf"rank {host} \(Worker_TP{host} on node {host}, host{host}\)"
    assert re.search(rf"{named} has not come to the all_reduce of TP \[0, 1\]", line), line
    assert line.count("has not come") == 1
    assert "not known" not in line
    if host:  # the doctor sees one host, and blames nobody on another
        (wait,) = json.loads(seen)["waits"]
        assert wait.startswith("it is not known here whether rank 1 has come to the all_reduce")


def test_a_host_without_power_while_requests_run_fails_them_with_its_name(job: Job) -> None:
    leader, _ = wait_phase(job, "serving")
    url = leader.wait_serving()
    program = (
        "import json, sys, urllib.request as r\n"
        "body = json.dumps({'model': 'model', 'prompt': [5, 6], 'max_tokens': 240,"
        " 'stream': True, 'ignore_eos': True, 'temperature': 0}).encode()\n"
        "q = r.Request(sys.argv[1] + '/v1/completions', body,"
        " {'content-type': 'application/json'})\n"
        "while True:\n"
        "    for line in r.urlopen(q, timeout=60):\n"
        "        print(line.decode().strip(), file=sys.stderr, flush=True)\n"
    )
    import subprocess
    import sys

    client = subprocess.Popen(
        job.hosts[0].command(sys.executable, "-c", program, url),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stderr is not None
    assert "data" in client.stderr.readline()
    begun = time.monotonic()
    job.hosts[1].unplug()
    _, rest = client.communicate(timeout=30)
    assert "no sign of life" in rest or "Connection refused" in rest
    assert "node1" in rest
    check_end(job, (leader,), 6, begun)


@pytest.mark.parametrize("phase", ["loading", "serving"])
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_on_either_node_ends_both_within_5_s(
    job: Job, host: int, phase: str, number: int, status: int
) -> None:
    nodes = wait_phase(job, phase)
    begun = time.monotonic()
    job.nodes[host].stop(number)
    for node in nodes:
        assert node.wait_exit(10) == status, node.output
        assert node.errors == []
    assert time.monotonic() - begun < 5
    job.wait_nothing_left(6, since=begun)
