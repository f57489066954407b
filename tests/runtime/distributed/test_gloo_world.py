"""Real gloo worlds of child processes, joined through a memory file or a socket of our own."""

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("gloo_rank.py")
DEADLINE_S = 60


@contextmanager
def memory_file():
    """The path of a store that leaves nothing on disk."""
    descriptor = os.memfd_create("vcli-test-rendezvous")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def start(scenario, rank, world_size, *, pass_fds=(), **options):
    command = [sys.executable, str(SCRIPT), scenario, str(rank), str(world_size)]
    return subprocess.Popen(
        [*command, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )


def results_of(children):
    """What each child printed; every child is gone afterwards."""
    try:
        outputs = [child.communicate(timeout=DEADLINE_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode in (0, -9), errors
    return [json.loads(output) if output else None for output, _ in outputs]


def run_world(scenario, world_size, **sizes):
    with memory_file() as path:
        return results_of(
            [
                start(scenario, rank, world_size, target={"path": path}, sizes=sizes)
                for rank in range(world_size)
            ]
        )


def test_collectives_stay_within_their_groups_and_tensors_go_to_the_next_stage():
    results = run_world("collectives", 4, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [result["sum"] for result in results] == [[3, 30], [3, 30], [7, 70], [7, 70]]
    gathered = [[[0, 1], [0, 1]]] * 2 + [[[2, 3], [2, 3]]] * 2
    assert [result["gathered"] for result in results] == gathered
    received = [{}, {}] + [{"hidden": [1, 1], "residual": [rank]} for rank in (0, 1)]
    assert [result["received"] for result in results] == received


@pytest.mark.parametrize("is_ring", [True, False])
def test_objects_of_any_source_reach_the_group_through_a_ring_per_source_or_as_tensors(is_ring):
    results = run_world("objects", 3, tensor_parallel_size=3, is_ring=is_ring)
    num_rings = 2 if is_ring else 0
    assert results == [
        {"received": [0, 2, 0], "num_rings": num_rings, "rank": rank} for rank in range(3)
    ]


def test_every_group_of_the_plan_is_made_and_verified():
    results = run_world("groups", 4, tensor_parallel_size=2, data_parallel_size=2, is_moe=True)
    for rank, result in enumerate(results):
        tp, dp = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert result["groups"] == {
            "TP": tp, "DCP": [rank], "PCP": [rank], "PP": [rank], "DP": dp, "EP": [0, 1, 2, 3],
        }  # fmt: skip
        assert result["reports"] == [
            ["TP", tp, True, "gloo/tcp", ""],
            ["DP", dp, True, "gloo/tcp", ""],
            ["EP", [0, 1, 2, 3], True, "gloo/tcp", ""],
        ]
        assert result["positive_times"]


def test_those_who_wait_name_the_ranks_that_did_not_come():
    with memory_file() as path:
        options = {"target": {"path": path}, "timeout_s": 1.5, "sizes": {}, "is_gated": True}
        children = [start("groups", rank, 4, **options) for rank in (0, 2)]
        for child in children:
            assert child.stdout.readline() == "imported\n"
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        results = results_of(children)
    for rank, result in zip((0, 2), results, strict=True):
        assert result["exit"] == 3
        assert f"rank {rank} waited 1.5 s" in result["join_error"]
        assert result["join_error"].endswith("of 4 ranks, 2 had not joined: 1, 3")


def test_a_store_that_is_gone_is_an_error_at_once():
    reader, writer = os.pipe()
    try:
        # The number of a closed descriptor is soon that of something else.
        paths = [f"/proc/{os.getpid()}/fd/{reader}", f"/proc/{os.getpid()}/fd/99999"]
        results = results_of([start("groups", 0, 2, target={"path": p}, sizes={}) for p in paths])
    finally:
        os.close(reader)
        os.close(writer)
    for path, result in zip(paths, results, strict=True):
        assert result == {"join_error": f"rank 0 finds no rendezvous store at {path}", "exit": 3}


def test_death_of_a_peer_ends_a_collective_with_an_error():
    survivor, dead = run_world("peer_dies", 2, tensor_parallel_size=2)
    assert survivor["error"]
    assert dead is None


def test_a_store_on_a_given_socket_listens_there_alone():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, descriptor = listener.getsockname()[1], listener.fileno()
        target = {"host": "127.0.0.1", "port": port}
        children = [
            start(
                "groups",
                0,
                2,
                pass_fds=(descriptor,),
                target={**target, "listen_fd": descriptor},
                sizes={"tensor_parallel_size": 2},
            ),
            start("groups", 1, 2, target=target, sizes={"tensor_parallel_size": 2}),
        ]
        results = results_of(children)
    assert [result["groups"]["TP"] for result in results] == [[0, 1], [0, 1]]
