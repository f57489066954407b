"""The load on a server that says what the test wrote: counts, times, failures."""

import json
import threading
from dataclasses import asdict
from itertools import pairwise

import pytest

from tests.support.scripted_server import STREAM_HEAD, piece, scripted, whole
from vcli.runtime.bench import serve
from vcli.runtime.bench.http_client import parse_base_url
from vcli.runtime.bench.serve import run_serve_bench
from vcli.runtime.bench.serve_spec import RequestRecord, ServeBenchSpec
from vcli.topology import ConfigError, ExitStatus, UnfitError

USUAL = {
    "endpoint": "completions",
    "num_prompts": 3,
    "input_len": 4,
    "output_len": 6,
    "request_rate": float("inf"),
    "max_concurrency": None,
    "request_timeout_s": 20.0,
    "temperature": 0.0,
    "vocab_size": 100,
    "seed": 0,
}


def spec_of(**changed):
    return ServeBenchSpec(**{**USUAL, **changed})


def run(server, *, model="m", notes=None, **changed):
    return run_serve_bench(
        spec_of(**changed),
        parse_base_url(server.url),
        model=model,
        headers={},
        note=(notes if notes is not None else []).append,
    )


def event(body):
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def body_of(request):
    return json.loads(request.partition(b"\r\n\r\n")[2])


def text(content, reason=None):
    return event({"choices": [{"text": content, "finish_reason": reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 6}})
DONE = event(b"[DONE]")


def streaming(*events):
    """A handler that streams these events."""

    def handle(request, connection):
        connection.sendall(STREAM_HEAD + b"".join(map(piece, events)) + piece(b""))

    return handle


def test_tokens_are_counted_by_usage_when_a_piece_has_several():
    with scripted(streaming(text("abc"), text("def", "length"), USAGE, DONE)) as server:
        result = run(server)
    assert result.status is ExitStatus.OK
    assert result.counts_from == "usage"
    assert [record.output_tokens for record in result.successes] == [6, 6, 6]
    assert [len(record.itl_s) for record in result.successes] == [1, 1, 1]


def test_tokens_are_pieces_where_the_server_reports_none():
    refusing = whole(400, b'{"error": {"message": "unknown: ignore_eos"}}')

    def handle(request, connection):
        if b"ignore_eos" in request:
            connection.sendall(refusing)
        else:
            streaming(text("a"), text("b"), text("c", "stop"), DONE)(request, connection)

    notes = []
    with scripted(handle) as server:
        result = run(server, notes=notes)
    assert (result.prompts, result.counts_from) == ("text", "chunks")
    assert [record.output_tokens for record in result.successes] == [3, 3, 3]
    assert "unknown: ignore_eos" in notes[0]


def test_events_cut_anywhere_between_packets_are_whole():
    stream = text("a") + text("ä€", "length") + USAGE + DONE

    def handle(request, connection):
        connection.sendall(
            STREAM_HEAD + b"".join(piece(stream[i : i + 1]) for i in range(len(stream)))
        )
        connection.sendall(piece(b""))

    with scripted(handle) as server:
        result = run(server, num_prompts=1)
    assert [record.error for record in result.records] == [""]
    assert len(result.records[0].arrivals) == 2


def test_chat_asks_with_messages_and_reads_deltas():
    delta = event({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]})
    with scripted(streaming(delta, USAGE, DONE)) as server:
        result = run(server, endpoint="chat", num_prompts=1)
        asked = body_of(server.requests[-1])
    assert len(result.successes) == 1
    assert asked["messages"][0]["content"].count(" ") == USUAL["input_len"] - 1
    assert b"POST /v1/chat/completions " in server.requests[-1]


def test_prompts_are_random_ids_that_differ_by_request_and_repeat_by_seed():
    with scripted(streaming(text("a", "stop"), DONE)) as server:
        run(server)
        first = sorted(body_of(request)["prompt"] for request in server.requests[1:])
        run(server)
        second = sorted(body_of(request)["prompt"] for request in server.requests[5:])
    assert first == second
    assert len({tuple(prompt) for prompt in first}) == 3
    assert all(10 <= token < 100 for prompt in first for token in prompt)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([text("a"), event({"error": {"message": "engine dead"}})], "engine dead"),
        ([text("a")], "without a finish reason"),
        ([event(b"{not json")], "cannot be read"),
        ([event({"choices": 5})], "cannot be read"),
    ],
)
def test_an_error_in_the_stream_is_a_failure_with_its_text(events, said):
    good = streaming(text("a", "stop"), DONE)
    answers = iter([good, streaming(*events), good, good])

    def handle(request, connection):
        next(answers)(request, connection)

    with scripted(handle) as server:
        result = run(server, max_concurrency=1)
    assert result.status is ExitStatus.UNFIT
    assert (len(result.successes), len(result.failures)) == (2, 1)
    assert said in result.failures[0].error


def test_a_connection_that_ends_in_an_answer_is_a_failure_and_the_rest_goes_on():
    good = streaming(text("a", "stop"), DONE)
    answers = iter([good, None, good, good])

    def handle(request, connection):
        answer = next(answers)
        if answer is not None:
            return answer(request, connection)
        connection.sendall(STREAM_HEAD + piece(text("a")))
        connection.shutdown(2)

    with scripted(handle) as server:
        result = run(server, max_concurrency=1)
    assert [bool(record.error) for record in result.records] == [True, False, False]
    assert "closed the connection" in result.failures[0].error
    assert result.status is ExitStatus.DIED_SERVING
    assert not result.is_server_gone


def test_connections_are_used_again():
    with scripted(streaming(text("a", "stop"), DONE)) as server:
        run(server, num_prompts=10, max_concurrency=1)
        assert len(server.requests) == 11
        assert server.num_connections == 1


def test_a_kept_connection_that_the_server_closed_costs_no_request():
    good = streaming(text("a", "stop"), DONE)

    def handle(request, connection):
        good(request, connection)
        connection.shutdown(2)

    with scripted(handle) as server:
        result = run(server, num_prompts=5, max_concurrency=1)
    assert len(result.successes) == 5


def test_a_request_without_an_answer_fails_at_its_deadline():
    good = streaming(text("a", "stop"), DONE)
    answers = iter([good])
    never = threading.Event()

    def handle(request, connection):
        answer = next(answers, None)
        if answer is None:
            never.wait(20)
        else:
            answer(request, connection)

    with scripted(handle) as server:
        result = run(server, num_prompts=1, request_timeout_s=0.3)
        never.set()
    assert result.failures[0].error == "no whole answer within 0.3 s"
    assert result.status is ExitStatus.UNFIT


def test_progress_counts_the_tokens_of_requests_that_still_run(monkeypatch):
    monkeypatch.setattr(serve, "_NOTE_EVERY_S", 0.01)
    notes, has_told = [], threading.Event()

    def note(line):
        notes.append(line)
        if "about 2 of 12 output tokens" in line:
            has_told.set()

    def handle(request, connection):
        connection.sendall(STREAM_HEAD + piece(text("a")) + piece(text("b")))
        if body_of(request)["max_tokens"] == 12:  # not the question before the load
            has_told.wait(20)
        connection.sendall(piece(text("c", "stop")) + piece(DONE) + piece(b""))

    with scripted(handle) as server:
        spec = spec_of(num_prompts=1, output_len=12)
        address = parse_base_url(server.url)
        result = run_serve_bench(spec, address, model="m", headers={}, note=note)
    assert has_told.is_set(), notes
    assert "0 of 1 requests, about 2 of 12 output tokens" in notes
    assert result.status is ExitStatus.OK


def test_never_more_requests_at_a_time_than_asked_for():
    lock, running, most = threading.Lock(), [0], [0]
    good = streaming(text("a", "stop"), DONE)

    def handle(request, connection):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        threading.Event().wait(0.01)
        with lock:
            running[0] -= 1
        good(request, connection)

    with scripted(handle) as server:
        run(server, num_prompts=20, max_concurrency=3)
    assert most[0] == 3


@pytest.mark.parametrize(
    ("response", "kind", "said"),
    [
        (whole(404, b'{"error": {"message": "no such model"}}'), ConfigError, "no such model"),
        (whole(404, b""), ConfigError, "refuses model 'm'"),
        (whole(401, b'{"detail": "key"}'), ConfigError, "key"),
        (whole(400, b"too long"), ConfigError, "too long"),
        (whole(503, b"loading"), UnfitError, "loading"),
        (b"SSH-2.0-OpenSSH\r\n", ConfigError, "no HTTP"),
        (b"", ConfigError, "closed the connection"),
    ],
)
def test_a_server_that_refuses_the_first_request_is_told_in_one_error(response, kind, said):
    def handle(request, connection):
        connection.sendall(response)
        connection.shutdown(2)

    with scripted(handle) as server, pytest.raises(kind, match=said):
        run(server)


@pytest.mark.parametrize(
    ("body", "said"), [(b"{}", "no list of models"), (b'{"data": []}', "names no model")]
)
def test_a_server_without_models_is_told(body, said):
    def handle(request, connection):
        connection.sendall(whole(200, body))

    with scripted(handle) as server, pytest.raises(ConfigError, match=said):
        run(server, model=None)


def test_the_served_model_is_taken_when_none_is_named():
    def handle(request, connection):
        if request.startswith(b"GET /v1/models "):
            connection.sendall(whole(200, b'{"data": [{"id": "first"}, {"id": "second"}]}'))
        else:
            streaming(text("a", "stop"), DONE)(request, connection)

    with scripted(handle) as server:
        result = run(server, model=None)
        assert body_of(server.requests[-1])["model"] == "first"
    assert result.model == "first"


def test_times_are_by_their_definitions():
    record = RequestRecord(
        index=0, sent_s=10.0, arrivals=[11.0, 13.0, 14.0], ended_s=15.0, output_tokens=7
    )
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (1.0, 0.5, 5.0)
    assert record.itl_s == [2.0, 1.0]
    silent = RequestRecord(index=0, sent_s=10.0, arrivals=[], ended_s=15.0)
    assert (silent.ttft_s, silent.tpot_s, silent.itl_s) == (None, None, [])


def test_poisson_times_have_the_rate_and_repeat():
    times = list(spec_of(num_prompts=2001, request_rate=50.0).start_times())
    gaps = [after - before for before, after in pairwise(times)]
    assert times == list(spec_of(num_prompts=2001, request_rate=50.0).start_times())
    assert times != list(spec_of(num_prompts=2001, request_rate=50.0, seed=1).start_times())
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.05)
    assert set(spec_of().start_times()) == {0.0}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://h:1", ("h", 1, False, "")),
        ("https://h/v1/", ("h", 443, True, "")),
        ("http://[::1]:80/a/v1", ("::1", 80, False, "/a")),
    ],
)
def test_base_urls_are_understood_with_and_without_v1(url, place):
    assert tuple(asdict(parse_base_url(url)).values()) == place


@pytest.mark.parametrize(
    "url", ["", "h:8000", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h:0",
            "http://h/a b", "http://hö/"],
)  # fmt: skip
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="--base-url"):
        parse_base_url(url)


@pytest.mark.parametrize(
    "changed",
    [{"num_prompts": 0}, {"input_len": 0}, {"output_len": -1}, {"request_rate": 0.0},
     {"request_rate": float("nan")}, {"max_concurrency": 0}, {"request_timeout_s": 0.0},
     {"endpoint": "embeddings"}, {"vocab_size": 1}, {"seed": -1}, {"temperature": -1.0}],
)  # fmt: skip
def test_loads_that_cannot_be_meant_are_refused(changed):
    with pytest.raises(ConfigError):
        spec_of(**changed)
