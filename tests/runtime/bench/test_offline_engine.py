"""The engine without HTTP: real processes with a tiny random model on the CPU."""

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.tiny_model import write_checkpoint
from tests.support.worker_steps import engine_config
from vcli.runtime.bench.offline import OfflineBench
from vcli.runtime.bench.offline_engine import OfflineEngine, RequestTimes
from vcli.runtime.bench.workloads import BenchRequest, equal_workload
from vcli.runtime.config import CacheConfig
from vcli.runtime.errors import EngineDeadError, RequestError
from vcli.runtime.process.silence import SilenceWatch
from vcli.topology import ParallelConfig

pytestmark = pytest.mark.process

PROMPT = [5, 9, 300, 17, 42, 8]


def engine_for(folder, parallel=None):
    cache = CacheConfig(block_size=4, enable_prefix_caching=False, kv_cache_memory_bytes=4 << 20)
    config = engine_config(folder, parallel=parallel, cache=cache)
    return OfflineEngine(config, on_message=lambda _: None, fork_server=None)


def test_tokens_are_those_of_the_reference_and_every_request_has_its_length(tmp_path):
    import torch

    model = write_checkpoint(tmp_path)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    requests = [BenchRequest(PROMPT, 8), BenchRequest(PROMPT[:3], 20)]
    with engine_for(tmp_path) as engine:
        first, second = engine.generate(requests)
        again, _ = engine.generate(requests)
    assert first.token_ids == expected[0, len(PROMPT) :].tolist()
    assert again.token_ids == first.token_ids
    assert len(second.token_ids) == 20
    assert sum(count for _, count in second.arrivals) == 20
    assert first.ttft_s > 0
    assert len(second.itl_s) == 19


def test_calls_reach_every_rank_and_runs_are_summed_up(tmp_path):
    write_checkpoint(tmp_path)
    workload = equal_workload(num_prompts=3, input_len=5, output_len=4, vocab_size=500)
    with engine_for(tmp_path, ParallelConfig(tensor_parallel_size=2)) as engine:
        assert engine.call_ranks("bench_noop") == [None, None]
        bench = OfflineBench(engine)
        steps = list(bench.run_all([workload], repeat=2))
        calls = bench.call_us(5)
        report = bench.device_report()
        speed = bench.memory_bytes_per_s()
        with pytest.raises(EngineDeadError, match="may not be called"):
            engine.call_ranks("load_model")
    assert [len(each.runs) for each in steps] == [1, 2]
    assert steps[-1].best.wall_s == min(run.wall_s for run in steps[-1].runs)
    assert steps[-1].best.output_tokens == 12
    assert steps[-1].ms_per_token is None
    assert calls is not None
    assert calls.count == 5
    assert [each.rank for each in report.memory] == [0, 1]
    assert min(each.peak_bytes for each in report.memory) > 10 << 20
    assert report.versions["torch"]
    assert speed > 0
    assert bench.first_token_age_s is not None


def test_a_refused_request_leaves_the_engine_well(tmp_path):
    write_checkpoint(tmp_path)
    with engine_for(tmp_path) as engine:
        with pytest.raises(RequestError, match="9999 is outside the vocabulary"):
            engine.generate([BenchRequest([9999], 4)])
        (well,) = engine.generate([BenchRequest(PROMPT, 4)])
    assert len(well.token_ids) == 4


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_a_killed_process_is_named_at_once_and_nothing_is_left(tmp_path, victim, caplog):
    write_checkpoint(tmp_path)
    with engine_for(tmp_path, ParallelConfig(tensor_parallel_size=2)) as engine:
        workers = dict(engine.started["worker_pids"])
        pid = workers["Worker_TP1"] if victim == "worker" else engine.core_pid
        left = [engine.core_pid, *workers.values()]
        engine._watch.trouble = "told before"
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=f"pid {pid}.*SIGKILL"):
            engine.call_ranks("bench_noop")
        with pytest.raises(EngineDeadError):
            engine.generate([BenchRequest(PROMPT, 4)])
    assert "answers again" not in caplog.text or victim == "worker"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(Path(f"/proc/{each}").exists() for each in left):
        time.sleep(0.02)
    assert [each for each in left if Path(f"/proc/{each}").exists()] == []


@pytest.mark.slow
def test_a_core_that_is_stopped_is_named_and_given_up(tmp_path):
    write_checkpoint(tmp_path)
    with engine_for(tmp_path) as engine:
        (before,) = engine.generate([BenchRequest(PROMPT, 4)])
        os.kill(engine.core_pid, signal.SIGSTOP)
        engine._watch = SilenceWatch("EngineCore", engine.core_pid, stall_s=1.0, limit_s=1.0)
        with pytest.raises(EngineDeadError, match=f"kill -CONT {engine.core_pid}"):
            engine.generate([BenchRequest(PROMPT, 4)])
    assert len(before.token_ids) == 4


@pytest.mark.slow
def test_a_core_that_goes_on_gives_the_rest_and_leaves_signals_to_its_owner(tmp_path, caplog):
    write_checkpoint(tmp_path)
    with engine_for(tmp_path) as engine, caplog.at_level(logging.WARNING, logger="vcli"):
        (before,) = engine.generate([BenchRequest(PROMPT, 4)])
        os.kill(engine.core_pid, signal.SIGTERM)
        os.kill(engine.core_pid, signal.SIGSTOP)
        with ThreadPoolExecutor() as pool:
            later = pool.submit(engine.generate, [BenchRequest(PROMPT, 4)])
            wait_until(lambda: f"kill -CONT {engine.core_pid}" in caplog.text, 20)
            os.kill(engine.core_pid, signal.SIGCONT)
            (after,) = later.result(20)
        wait_until(lambda: f"EngineCore (pid {engine.core_pid}) got SIGTERM" in caplog.text, 20)
    assert after.token_ids == before.token_ids


def test_tokens_that_come_together_share_their_time():
    times = RequestTimes(1.0, arrivals=[(3.0, 1), (5.0, 2), (6.0, 1)])
    assert times.ttft_s == 2.0
    assert times.itl_s == [1.0, 1.0, 1.0]
