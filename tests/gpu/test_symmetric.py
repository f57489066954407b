"""Sums over the memory of two real GPUs: right in graphs, under load, and in their choice."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.process,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, {NUM_GPUS} are visible"),
]

SCRIPT = Path(__file__).with_name("symmetric_rank.py")
DEADLINE_S = 150


def run_pair(scenario, **options):
    """What both ranks give; a rank that hangs at its end is a failure."""
    descriptor = os.memfd_create("vcli-test-store")
    options["store"] = f"/proc/{os.getpid()}/fd/{descriptor}"
    children = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), scenario, str(rank), "2", json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + DEADLINE_S
    try:
        outputs = [
            child.communicate(timeout=max(deadline - time.monotonic(), 1)) for child in children
        ]
    finally:
        for child in children:
            child.kill()
            child.wait()
        os.close(descriptor)
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_way_gives_the_sums_of_nccl_in_replayed_graphs(dtype):
    assert run_pair("graphs", dtype=dtype) == [{"wrong": []}] * 2


def test_ten_thousand_calls_in_a_row_are_right():
    assert run_pair("stress", calls=10_000) == [{"bad": 0, "lost": None}] * 2


def test_a_group_chooses_peer_memory_and_says_what_it_found():
    first, second = run_pair("prepared")
    assert first["all_reduce"] == second["all_reduce"]
    assert "with the norm in one kernel" in first["all_reduce"], first["note"]
    assert first["transport"] == "nccl"
    assert first["verified"]
    assert second["verified"]
    assert first["pairs"] == 2
    assert first["note"] == second["note"] == ""


@pytest.mark.parametrize("breaks", ["sums wrongly", "raises"])
def test_a_way_that_fails_on_one_rank_is_dropped_on_both(breaks):
    first, second = run_pair("prepared", breaks=breaks)
    assert first["all_reduce"] == second["all_reduce"]
    assert "one-shot" not in first["all_reduce"]
    assert "one-shot at 8 KiB is out" in first["note"]
    assert first["note"] == second["note"]
    assert first["verified"]
    assert second["verified"]


def test_the_probe_runs_all_its_steps():
    run = subprocess.run(
        [sys.executable, "-m", "vcli.runtime.distributed.gpu_probe", "--devices", "0,1", "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    events = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, run.stdout + run.stderr
    done = {event["step"]: event for event in events if event["state"] == "done"}
    assert {"memory before", "device", "join", "peer memory", "graph", "end"} <= set(done)
    pairs = done["peer memory"]["pairs"]
    assert [(pair["src"], pair["dst"], pair["wrong_bytes"]) for pair in pairs] == [
        (0, 1, 0), (1, 0, 0),
    ]  # fmt: skip
    assert done["all-reduce 268435456"]["busbw_GBps"] > 1
