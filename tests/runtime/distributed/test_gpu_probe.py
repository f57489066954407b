"""The probe of GPUs: what it says where there are none, and of processes that hang or die."""

import json
import signal
import subprocess
import sys

import pytest
import torch

from vcli.runtime.distributed import gpu_probe
from vcli.runtime.distributed.gpu_measures import pair_rounds
from vcli.runtime.distributed.probe_ranks import ProbeRanks

pytestmark = pytest.mark.process

SCRIPT = """
import sys, time, os, signal
sys.stdout.write('{"rank": %d, "step": "join", "state": "started"}\\n' % int(sys.argv[1]))
sys.stdout.write("some library\\n")
sys.stdout.flush()
"""


def follow(*endings, step_limit_s=60.0):
    """Whether processes that end in these ways went well, and what was said of them."""
    events = []
    ranks = ProbeRanks(
        [[sys.executable, "-c", SCRIPT + end, str(rank)] for rank, end in enumerate(endings)],
        events.append,
    )
    try:
        return ranks.follow(step_limit_s), events
    finally:
        ranks.end()
        assert all(child.poll() is not None for child in ranks.children)


def test_what_the_processes_write_is_passed_on():
    is_well, events = follow("", "")
    assert is_well
    assert sorted(event["rank"] for event in events) == [0, 1]


def test_a_hang_names_the_step_and_the_ranks_in_it_and_ends_them():
    is_well, events = follow("", "signal.pause()", step_limit_s=5.0)
    assert not is_well
    assert events[-1] == {"rank": 1, "step": "join", "state": "hung", "seconds": 5.0}


def test_a_process_that_dies_is_named_with_its_status_and_last_words():
    is_well, events = follow(
        "sys.stderr.write('out of luck'); sys.stderr.flush(); os.kill(os.getpid(), signal.SIGKILL)",
        "sys.stdin.read()",
    )
    assert not is_well
    assert events[-1] == {
        "rank": 0, "step": "join", "state": "failed", "exit_status": -signal.SIGKILL,
        "message": "out of luck",
    }  # fmt: skip


def test_a_rank_ends_with_its_parent():
    child = subprocess.Popen(
        [sys.executable, "-c",
         "import time; from vcli.runtime.distributed import gpu_probe;"
         "gpu_probe._watch_lifeline(); print('armed', flush=True); time.sleep(600)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == b"armed\n"
        child.stdin.close()
        assert child.wait(30) == 1
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are there")
def test_without_gpus_each_rank_says_so():
    run = subprocess.run(
        [sys.executable, "-m", gpu_probe.MODULE, "--devices", "0,1", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    events = [json.loads(line) for line in run.stdout.splitlines()]
    failed = [event for event in events if event["state"] == "failed" and "rank" in event]
    assert run.returncode == 1
    assert failed[0]["step"] == "device"
    assert "0 CUDA devices are there" in failed[0]["message"]
    assert run.stderr == ""


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_rounds_have_each_ordered_pair_once_and_no_rank_twice(num_ranks):
    rounds = list(pair_rounds(num_ranks))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [
        (src, dst) for src in range(num_ranks) for dst in range(num_ranks) if src != dst
    ]
    for chosen in rounds:
        ranks = [rank for pair in chosen for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_eight_gpus_take_few_rounds():
    assert len(list(pair_rounds(8))) == 14


def test_a_death_is_told_before_who_only_lost_it():
    is_well, events = follow(
        "sys.stdin.read()",
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert not is_well
    assert [
        (event["rank"], event["exit_status"]) for event in events if "exit_status" in event
    ] == [(1, -signal.SIGKILL)]


@pytest.mark.parametrize("devices", ["0,0", "0,-1", "a,b", ""])
def test_devices_that_make_no_sense_are_refused(devices, capsys):
    with pytest.raises(SystemExit) as end:
        gpu_probe.main([f"--devices={devices}"])
    assert end.value.code == 2
    assert "--devices" in capsys.readouterr().err
