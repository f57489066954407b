"""`vcli bench serve` against a real `vcli serve` of a folder with config.json alone."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.bench_command import bench_running, run_bench, write_config
from tests.support.serving import Server, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = "vcli:generation_tokens_total"
LOAD = ("--input-len", "8", "--output-len", "12", "--vocab-size", "500")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("dummy")
    model = write_config(folder / "tiny")
    arguments = [str(model), "--load-format", "dummy", "--kv-cache-memory", "8M"]
    with serving(arguments, folder=folder) as server:
        yield server, server.wait_serving()


def test_every_request_gets_its_tokens_and_the_server_counts_the_same(
    running: tuple[Server, str], tmp_path: Path
):
    server, url = running
    before = server.metrics(url)[TOKENS]
    saved = tmp_path / "result.json"
    status, out, err = run_bench(
        "serve", "--base-url", url, *LOAD, "--num-prompts", "12", "--request-rate", "200",
        "--max-concurrency", "4", "--json", "--save", str(saved),
    )  # fmt: skip
    assert status == 0, err
    document = json.loads(out)
    assert (document["schema"], document["exit_code"]) == ("vcli.bench-serve/1", 0)
    assert (document["successes"], document["failures"], document["unfinished"]) == (12, 0, 0)
    assert (document["model"], document["prompts"], document["counts_from"]) == (
        "tiny", "tokens", "usage",
    )  # fmt: skip
    assert (document["prompt_tokens"], document["output_tokens"]) == (12 * 8, 12 * 12)
    assert set(document["ttft_s"]) >= {"mean", "median", "p90", "p99"}
    assert document["e2e_s"]["median"] >= document["ttft_s"]["median"]
    # two tokens of the question before the load
    assert server.metrics(url)[TOKENS] - before == 12 * 12 + 2
    whole = json.loads(saved.read_text())
    assert [each["output_tokens"] for each in whole["requests"]] == [12] * 12


def test_ids_beyond_the_vocabulary_fall_back_to_text_and_say_so(running: tuple[Server, str]):
    _, url = running
    status, out, err = run_bench(
        "serve", "--base-url", f"{url}/v1", "--num-prompts", "2", "--input-len", "8",
        "--output-len", "3", "--vocab-size", "100000",
    )  # fmt: skip
    assert status == 0, err
    assert "outside the vocabulary" in err
    assert "(sent as text)" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "other"], "refuses model 'other'"),
        (["--input-len", "600"], "at most 511 fit"),
        (["--endpoint", "chat"], "has no chat template"),
        (["--save", "/no/such/folder/x"], "--save"),
    ],
)
def test_what_the_server_refuses_is_one_message_and_exit_2(
    running: tuple[Server, str], arguments: list[str], said: str
):
    _, url = running
    status, out, err = run_bench("serve", "--base-url", url, *LOAD, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("error: ") == 1


def test_a_wrong_path_and_a_port_without_a_server_are_exit_2(running: tuple[Server, str]):
    _, url = running
    for wrong, said in ((f"{url}/api", "HTTP 404"), ("http://127.0.0.1:9", "Connection refused")):
        status, out, err = run_bench("serve", "--base-url", wrong)
        assert (status, out) == (2, "")
        assert said in err
        assert err.count("error: ") == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_prints_what_is_known(
    running: tuple[Server, str], number: signal.Signals, status: int
):
    server, url = running
    before = server.metrics(url)[TOKENS]
    with bench_running(
        "serve", "--base-url", url, "--input-len", "8", "--output-len", "100", "--vocab-size",
        "500", "--num-prompts", "100000", "--max-concurrency", "4", "--json",
    ) as child:  # fmt: skip
        while server.metrics(url)[TOKENS] < before + 1000:
            assert child.poll() is None
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
    assert child.returncode == status
    assert "stopped: this is what is known" in err
    document = json.loads(out)
    assert document["exit_code"] == status
    assert document["successes"] > 0
    assert document["failures"] == 0
    assert "Traceback" not in err


def test_a_server_killed_in_the_middle_is_exit_6_with_the_partial_result(tmp_path: Path):
    model = write_config(tmp_path / "tiny")
    arguments = [str(model), "--load-format", "dummy", "--kv-cache-memory", "8M"]
    with serving(arguments, folder=tmp_path) as server:
        url = server.wait_serving()
        with bench_running(
            "serve", "--base-url", url, "--input-len", "8", "--output-len", "100",
            "--vocab-size", "500", "--num-prompts", "100000", "--max-concurrency", "4", "--json",
        ) as child:  # fmt: skip
            while server.metrics(url)[TOKENS] < 1000:
                assert child.poll() is None
            os.kill(server.pid, signal.SIGKILL)
            out, err = child.communicate(timeout=30)
    assert child.returncode == 6
    document = json.loads(out)
    assert document["exit_code"] == 6
    assert document["successes"] > 0
    # Those that were under way, and a few that met a closed port; not the 100,000.
    assert 0 < document["failures"] < 100
    assert document["unfinished"] > 90000
    assert "the server went away" in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
