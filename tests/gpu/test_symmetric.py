"""Sums over the memory of 2, 4 or 8 real GPUs: right in graphs, under load, in their choice."""

import json
import os
import subprocess
import sys
import time
from itertools import permutations
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

#: As many ranks as there are GPUs.
WORLD = max(size for size in (2, 4, 8) if size <= max(NUM_GPUS, 2))
#: A failed attempt at multicast can put the GPUs of a host out of service.
ENVIRON = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", **os.environ}
SCRIPT = Path(__file__).with_name("symmetric_rank.py")
DEADLINE_S = 150


def run_ranks(scenario, **options):
    """What each rank gives; a rank that hangs at its end is a failure."""
    descriptor = os.memfd_create("vcli-test-store")
    options["store"] = f"/proc/{os.getpid()}/fd/{descriptor}"
    children = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), scenario, str(rank), str(WORLD), json.dumps(options)],
            env=ENVIRON,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    deadline = time.monotonic() + DEADLINE_S
    try:
        outputs = [output_of(child, deadline) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
        os.close(descriptor)
    failed = [
        f"rank {rank} ended with {child.returncode}: {errors[-3000:]}"
        for rank, (child, (_, errors)) in enumerate(zip(children, outputs, strict=True))
        if child.returncode
    ]
    assert not failed, "\n".join(failed)
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def output_of(child, deadline):
    """What it wrote until it ended, or was killed because it was late."""
    try:
        return child.communicate(timeout=max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_way_sums_rightly_in_replayed_graphs(dtype):
    assert run_ranks("graphs", dtype=dtype) == [{"wrong": []}] * WORLD


def test_ten_thousand_calls_in_a_row_are_right():
    assert run_ranks("stress", calls=10_000) == [{"bad": 0, "lost": None}] * WORLD


def test_a_group_chooses_peer_memory_and_says_what_it_found():
    first, *others = run_ranks("prepared")
    assert {other["all_reduce"] for other in others} == {first["all_reduce"]}
    assert "with the norm in one kernel" in first["all_reduce"], first["note"]
    assert first["transport"] == "nccl"
    assert all(found["verified"] for found in (first, *others))
    assert first["pairs"] == WORLD * (WORLD - 1)
    assert {found["note"] for found in (first, *others)} == {""}


@pytest.mark.parametrize("breaks", ["sums wrongly", "raises"])
def test_a_way_that_fails_on_one_rank_is_dropped_on_all(breaks):
    first, *others = run_ranks("prepared", breaks=breaks)
    assert {other["all_reduce"] for other in others} == {first["all_reduce"]}
    assert "one-shot" not in first["all_reduce"]
    assert "one-shot at 8 KiB is out" in first["note"]
    assert {other["note"] for other in others} == {first["note"]}
    assert all(found["verified"] for found in (first, *others))


def test_the_probe_runs_all_its_steps():
    devices = ",".join(map(str, range(WORLD)))
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "vcli.runtime.distributed.gpu_probe",
            "--devices",
            devices,
            "--json",
        ],
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    events = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, run.stdout + run.stderr
    done = {event["step"]: event for event in events if event["state"] == "done"}
    assert {"memory before", "device", "join", "peer memory", "graph", "end"} <= set(done)
    pairs = done["peer memory"]["pairs"]
    assert sorted((pair["src"], pair["dst"], pair["wrong_bytes"]) for pair in pairs) == [
        (src, dst, 0) for src, dst in permutations(range(WORLD), 2)
    ]
    assert done["all-reduce 268435456"]["busbw_GBps"] > 1
