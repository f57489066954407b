"""Two hosts meet, or say who is missing, what differs, whose key is wrong."""

import signal
import time
from pathlib import Path

import pytest

from tests.support.job import Job, job_of
from tests.support.lab import lab_of, why_no_lab
from tests.support.tiny_model import write_checkpoint
from tests.support.tiny_tokenizer import write_tokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_lab()), reason=why_no_lab() or "there is a lab"),
]

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("first", [0, 1])
def test_either_node_may_start_first(job: Job, first: int) -> None:
    job.start(first, "-pp", "2")
    waits = r"missing node 1" if first == 0 else r"waiting for node 0: .*connection refused"
    job.nodes[0].wait_line(waits)
    job.start(1 - first, "-pp", "2")
    leader, follower = sorted(job.nodes, key=lambda node: node.host.index)
    url = leader.wait_serving()
    assert job.ask(url, PROMPT)["usage"]["completion_tokens"] == 8
    follower.wait_line(rf"node 0 \(host0\) serves at {url}")
    # The ranks of both nodes are seen on node 0; no token was given, and that is said.
    leader.wait_line("ranks 0-1 weights")
    for node in job.nodes:
        assert "[NET-14]" in node.output
        node.wait_line("eth0|agree")


def test_a_host_name_that_means_loopback_does_not_matter(tmp_path: Path, model: Path) -> None:
    """Left to itself, gloo would tell the other host to connect to 127.0.1.1."""
    with (
        lab_of(2, tmp_path, names_are_loopback=True) as own,
        job_of(own.hosts, tmp_path, model) as job,
    ):
        leader, _ = job.start_all("-tp", "2", "--no-preflight")
        assert job.ask(leader.wait_serving(), PROMPT)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("alone", [0, 1])
def test_a_missing_node_is_named_at_the_deadline_and_exit_is_3(job: Job, alone: int) -> None:
    begun = time.monotonic()
    node = job.start(alone, "-pp", "2", "--join-timeout", "7")
    assert node.wait_exit(60) == 3
    assert time.monotonic() - begun < 20
    assert len(node.errors) == 1
    assert f"node {1 - alone} did not come within 7 s" in node.errors[0]
    if alone == 0:
        # The first line at once, the second after five seconds; each with the line to type.
        assert node.output.count("missing node 1") == 2
        assert f"vcli launch -n 2 -r 1 --master-addr {job.hosts[0].address}" in node.output
    else:
        assert "connection refused" in node.errors[0]


def test_a_third_node_that_is_missing_is_named_on_both_others(job: Job) -> None:
    three = ["-n", "3", "-pp", "3", "--join-timeout", "6"]
    leader, follower = job.start_all(*three)
    assert leader.wait_exit(60) == 3
    assert follower.wait_exit(60) == 3
    for node in (leader, follower):
        assert "node 2 did not come within" in node.errors[0]


def test_a_port_that_a_firewall_drops_is_called_that(job: Job, tmp_path: Path, model: Path) -> None:
    with lab_of(2, tmp_path) as own, job_of(own.hosts, tmp_path, model) as dropped:
        own.hosts[0].drop_port(29502)
        leader = dropped.start(0, "-pp", "2", "--join-timeout", "12")
        follower = dropped.start(1, "-pp", "2", "--join-timeout", "12")
        assert follower.wait_exit(60) == 3
        assert leader.wait_exit(60) == 3
    assert "a firewall drops" in follower.errors[0]


def test_different_tp_is_named_on_both_and_exit_is_4(job: Job) -> None:
    leader = job.start(0, "-tp", "2")
    follower = job.start(1, "-tp", "4")
    assert follower.wait_exit(60) == 4
    assert leader.wait_exit(60) == 4
    for node in (leader, follower):
        assert len(node.errors) == 1
        assert "--tensor-parallel-size (-tp): node 0 has 2, node 1 has 4" in node.output


def test_a_weight_file_of_another_size_is_named(job: Job, tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = other / "model.safetensors"
    write_checkpoint(other, intermediate_size=128)
    write_tokenizer(other)
    sizes = [path.stat().st_size for path in (model / weights.name, weights)]
    leader = job.start(0, "-pp", "2")
    job.model = other
    follower = job.start(1, "-pp", "2")
    assert follower.wait_exit(60) == 4
    assert leader.wait_exit(60) == 4
    for node in (leader, follower):
        assert (
            f"weights {weights.name}: node 0 has {sizes[0]} bytes, node 1 has {sizes[1]} bytes"
            in node.output
        )


TOKEN = {"VCLI_JOB_TOKEN": "0123456789abcdef"}
OTHER = {"VCLI_JOB_TOKEN": "fedcba9876543210"}


@pytest.mark.parametrize(
    ("here", "there"),
    [
        pytest.param(TOKEN, OTHER, id="different"),
        pytest.param(TOKEN, {}, id="only-node-0"),
        pytest.param({}, TOKEN, id="only-node-1"),
    ],
)
def test_a_wrong_token_is_refused_and_named_on_both(
    job: Job, here: dict[str, str], there: dict[str, str]
) -> None:
    leader = job.start(0, "-pp", "2", environ=here)
    follower = job.start(1, "-pp", "2", environ=there)
    assert follower.wait_exit(60) == 4
    assert leader.wait_exit(60) == 4
    for node in (leader, follower):
        assert len(node.errors) == 1
        assert "refused" in node.errors[0]
        assert "token" in node.errors[0]
    assert job.hosts[1].address in leader.errors[0]


def test_a_token_file_and_a_variable_with_the_same_token_work(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN["VCLI_JOB_TOKEN"] + "\n")
    leader = job.start(0, "-pp", "2", "--job-token-file", str(file))
    job.start(1, "-pp", "2", environ=TOKEN)
    assert job.ask(leader.wait_serving(), PROMPT)["usage"]["completion_tokens"] == 8
    assert "NET-14" not in leader.output


def test_a_rank_that_is_taken_is_refused_and_the_job_goes_on(job: Job) -> None:
    three = ["-n", "3", "-pp", "3", "--join-timeout", "20"]
    leader = job.start(0, *three)
    job.start(1, *three)
    leader.wait_line(r"node 1 \(host1.* is here")
    second = job.start(1, *three)
    assert second.wait_exit(60) == 4
    assert "--node-rank 1 is taken by node 1 (host1" in second.errors[0]
    leader.wait_line(r"refused node 1 \(host1")
    assert leader.process.poll() is None


def test_a_node_that_is_no_node_0_says_so(job: Job) -> None:
    job.hosts = list(reversed(job.hosts))
    node = job.start(
        0,
        "-pp",
        "2",
        "--master-addr",
        job.hosts[1].address,
        "--host",
        "127.0.0.1",
        "--no-preflight",
    )
    assert node.wait_exit(60) == 2
    assert "this is not node 0" in node.errors[0]


@pytest.mark.parametrize("stopped", [0, 1])
def test_ctrl_c_while_joining_ends_both_within_5_s(job: Job, stopped: int) -> None:
    three = ["-n", "3", "-pp", "3"]
    leader, follower = job.start_all(*three)
    follower.wait_line("node 0 is here, missing node 2|node 0 at .* is here")
    leader.wait_line(r"node 1 \(host1.* is here")
    begun = time.monotonic()
    job.nodes[stopped].stop(signal.SIGINT)
    assert job.nodes[stopped].wait_exit(10) == 130
    assert job.nodes[1 - stopped].wait_exit(10) == 130
    assert time.monotonic() - begun < 5
    assert "was stopped by its user" in job.nodes[1 - stopped].output
    job.wait_nothing_left(5, since=begun)
