"""What `bench serve` says of requests that failed: every kind with its count."""

import json

import pytest

from tests.runtime.bench.test_serve_bench import DONE, run, streaming, text
from tests.support.scripted_server import scripted, whole
from vcli.cli.views.bench_serve import failures_text
from vcli.runtime.bench.serve import ServeBenchResult
from vcli.runtime.bench.serve_spec import RequestRecord
from vcli.topology import ConfigError, ExitStatus


def refusal(status: int, message: str) -> bytes:
    return whole(status, json.dumps({"error": {"message": message}}).encode())


def result_of(errors: list[str], template: ServeBenchResult) -> ServeBenchResult:
    template.records = [
        RequestRecord(index=place, sent_s=0.0, arrivals=[], ended_s=place, error=error)
        for place, error in enumerate(errors)
    ]
    return template


def test_refusals_are_counted_by_status_and_message_numbers_aside():
    good = streaming(text("a", "stop"), DONE)
    messages = ["queue has 7 places", "queue has 12 places", "busy"]
    answers = iter(
        [
            good,  # the question before the load
            *(refusal(429, message) for message in messages),
            refusal(503, "busy"),
            refusal(503, "busy"),
            good,
        ]
    )

    def handle(request, connection):
        answer = next(answers)
        if isinstance(answer, bytes):
            connection.sendall(answer)
        else:
            answer(request, connection)

    with scripted(handle) as server:
        result = run(server, num_prompts=6, max_concurrency=1)
    assert result.status is ExitStatus.UNFIT
    kinds = [(kind.count, kind.error) for kind in result.failure_kinds()]
    assert kinds == [
        (2, "HTTP 429: queue has 7 places"),
        (2, "HTTP 503: busy"),
        (1, "HTTP 429: busy"),
    ]
    lines = failures_text(result).splitlines()
    assert lines == ["5 of 6 requests failed", *(f"  {n} × {error}" for n, error in kinds)]


def test_a_handful_of_kinds_is_shown_and_the_rest_counted():
    words = ["ant", "bee", "cow", "dog", "eel", "fly", "gnu"]
    errors = [word for place, word in enumerate(words) for _ in range(9 - place)]
    with scripted(streaming(text("a", "stop"), DONE)) as server:
        result = result_of(errors, run(server))
    *_, fifth, rest = failures_text(result).splitlines()
    assert (fifth, rest) == ("  5 × eel", "  7 × 2 other kinds (--json has them)")


def test_every_refused_form_of_the_first_request_is_told():
    def handle(request, connection):
        is_tokens = b'"prompt":[' in request.replace(b" ", b"")
        connection.sendall(
            refusal(400, "no token ids" if is_tokens else "no model that takes text")
        )

    with scripted(handle) as server, pytest.raises(ConfigError) as raised:
        run(server)
    assert raised.value.message.splitlines() == [
        "the server refuses the requests",
        "  prompts as tokens: HTTP 400: no token ids",
        "  prompts as text: HTTP 400: no model that takes text",
    ]


def test_refusals_on_the_way_to_a_form_that_works_are_told_each():
    def handle(request, connection):
        if b'"prompt":[' in request.replace(b" ", b""):
            connection.sendall(refusal(400, "no token ids"))
        elif b"ignore_eos" in request:
            connection.sendall(refusal(422, "unknown: ignore_eos"))
        else:
            streaming(text("a", "stop"), DONE)(request, connection)

    notes: list[str] = []
    with scripted(handle) as server:
        run(server, notes=notes)
    assert notes[:2] == [
        "! the server refused prompts as tokens (HTTP 400: no token ids)",
        "! the server refused prompts as text (HTTP 422: unknown: ignore_eos)",
    ]
