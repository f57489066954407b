"""`vcli bench offline` from outside: a real engine on the CPU with a tiny model."""

import json
import os
import re
import signal

import pytest

from tests.support.bench_command import bench_running, pid_of, run_bench, write_config
from tests.support.tiny_model import write_checkpoint

pytestmark = pytest.mark.process

SMALL = ("--kv-cache-memory", "4M", "--num-prompts", "3", "--input-len", "8", "--output-len", "5")


def test_json_is_one_document_with_every_figure_and_its_floors(tmp_path):
    model = write_config(tmp_path / "tiny")
    status, out, err = run_bench(
        "offline", str(model), "--load-format", "dummy", *SMALL, "--json",
        "--rpc-calls", "7", "--memory-bandwidth", "10", "--peak-tflops", "0.5", "--repeat", "3",
    )  # fmt: skip
    assert status == 0, err
    document = json.loads(out)
    assert (document["schema"], document["exit_code"]) == ("vcli.bench-offline/1", 0)
    (workload,) = document["workloads"]
    assert (workload["requests"], workload["prompt_tokens"], workload["output_tokens"]) == (
        3,
        24,
        15,
    )
    assert len(workload["runs"]) == 3
    assert workload["wall_s"] == min(run["wall_s"] for run in workload["runs"])
    assert workload["output_tokens_per_s"] == pytest.approx(15 / workload["wall_s"])
    assert workload["ms_per_token"] is None
    assert workload["ttft_s"]["count"] == 3
    assert workload["itl_s"]["count"] == 12
    floors = workload["floors"]
    assert 0 < floors["bytes_s"] < workload["wall_s"]
    assert 0 < floors["ops_s"] < workload["wall_s"]
    assert 0 < document["start"]["ready_s"] < document["start"]["first_token_s"]
    assert document["memory"][0]["peak_bytes"] > 0
    assert document["plan"]["tp"] == 1
    assert document["started"]["effective"]["prefix_caching"] is False
    assert document["rpc_us"]["count"] == 7
    assert document["device"]["memory_bytes_per_s"] == 10e9
    assert document["versions"]["torch"]
    assert document["error"] is None


def test_a_checkpoint_needs_no_tokenizer_and_tp_two_runs_it(tmp_path):
    write_checkpoint(tmp_path)
    status, out, err = run_bench("offline", str(tmp_path), *SMALL, "-tp", "2", "--repeat", "1")
    assert status == 0, err
    assert re.search(r"^3x8\+5 +3 +24/15 ", out, re.MULTILINE)
    assert "tp 2" in out
    assert "ready after" in out


def test_ctrl_c_prints_the_runs_that_are_known(tmp_path):
    model = write_config(tmp_path / "tiny")
    with bench_running(
        "offline", str(model), "--load-format", "dummy", "--kv-cache-memory", "4M",
        "--num-prompts", "4", "--output-len", "200", "--input-len", "8", "--repeat", "1000",
        "--json",
    ) as child:  # fmt: skip
        for line in child.stderr:
            if "run 2 of 1000" in line:
                break
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "stopped: this is what is known" in err
    assert "Traceback" not in err
    document = json.loads(out)
    assert document["exit_code"] == 130
    assert len(document["workloads"][0]["runs"]) >= 2


def test_a_worker_killed_in_a_run_gives_exit_6_its_cause_and_the_runs_before(tmp_path):
    model = write_config(tmp_path / "tiny")
    with bench_running(
        "offline", str(model), "--load-format", "dummy", "--kv-cache-memory", "4M", "-tp", "2",
        "--num-prompts", "4", "--output-len", "200", "--input-len", "8", "--repeat", "1000",
        "--json",
    ) as child:  # fmt: skip
        for line in child.stderr:
            if "run 1 of 1000" in line:
                break
        os.kill(pid_of(child, "Worker_TP1"), signal.SIGKILL)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 6, err
    document = json.loads(out)
    assert document["exit_code"] == 6
    assert "Worker_TP" in document["error"]
    assert len(document["workloads"][0]["runs"]) >= 1
    assert err.count("error: ") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "llama9b"], "'llama9b' is unknown"),
        (["--shape", "llama8b", "folder"], "are two models"),
        (["--workload", "batch33"], "'batch33' is unknown"),
        (["--num-prompts", "0"], "--num-prompts 0"),
        (["--repeat", "0"], "--repeat 0"),
        (["--rpc-calls", "-1"], "--rpc-calls -1"),
        (["--memory-bandwidth", "nan"], "--memory-bandwidth nan"),
        (["--peak-tflops", "-3"], "--peak-tflops -3"),
        (["--peak-tflops", "1e300"], "--peak-tflops 1e+300 must be 0.001 to 1000000"),
        (["--memory-bandwidth", "1e300"], "--memory-bandwidth 1e+300 must be 0.001 to 1000000"),
        (["--memory-bandwidth", "5e-324"], "must be 0.001 to 1000000"),
        (["--input-len", "2"], "--input-len 2 is the length of requests of --num-prompts"),
        (["--output-len", "2"], "--output-len 2 is the length of requests of --num-prompts"),
        (["--workload", "all", "--num-prompts", "2"], "are two workloads"),
        (["--output-len", "2", "--output-len", "nan"], "(got 'nan')"),
        (["/no/such/model"], "/no/such/model"),
        (["--port", "1"], "no such flag: --port"),
        (["-dp", "2"], "topo plans this"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0"),
    ],
)
def test_what_is_typed_wrong_gives_one_message_and_exit_2(arguments, said):
    status, out, err = run_bench("offline", *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err


def test_a_workload_beyond_the_model_is_told_before_the_engine_starts(tmp_path):
    model = write_config(tmp_path / "tiny")
    status, out, err = run_bench("offline", str(model), "--load-format", "dummy")
    assert (status, out) == (2, "")
    assert "the model's vocabulary has 512 tokens" in err
    assert "rank 0" not in err
