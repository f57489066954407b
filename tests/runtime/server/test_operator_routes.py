"""Health, readiness, metrics and the small routes."""

import re
from importlib import metadata

from tests.support.serving_core import NAME, Serving
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.server.app import build_app
from vcli.runtime.server.metrics import ServerMetrics

GET_ROUTES = ("/health", "/ready", "/metrics", "/version", "/server_info", "/v1/models")


def samples(served: Serving) -> dict[str, float]:
    text = served.http.get("/metrics").text
    found = re.findall(r"^(vcli:\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE)
    return {f"{name}{{{labels}}}": float(value) for name, labels, value in found}


def test_health_version_and_server_info(served: Serving) -> None:
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/version").json() == {"version": "1.2.3"}
    assert served.http.get("/server_info").json() == {"plan": {"world_size": 1}}


def test_head_is_get_without_a_body(served: Serving) -> None:
    for path in (*GET_ROUTES, f"/v1/models/{NAME}"):
        answer = served.http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path


def test_version_is_the_installed_one_unless_given(served: Serving) -> None:
    app = build_app(served.engine, served_name=NAME, metrics=ServerMetrics(NAME))
    assert app.state.server.version == metadata.version("vcli-toolkit")


def test_detokenize_takes_no_more_ids_than_the_model_has_places(served: Serving) -> None:
    answer = served.post("/detokenize", tokens=[1] * 201)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tokens"
    assert served.post("/detokenize", tokens=[True]).status_code == 400


def test_ready_names_the_ranks_that_did_not_answer_and_asks_once_a_second(start) -> None:
    with start() as served:
        served.core.replies["check_health"] = {
            "is_healthy": False,
            "answered": [0],
            "missing": [1, 3],
            "errors": {"1": "timed out", "3": "timed out"},
        }
        answer = served.http.get("/ready")
        assert answer.status_code == 503
        assert "rank 1, 3" in answer.json()["reason"]
        served.core.replies["check_health"] = None  # would be an error if it were asked again
        assert served.http.get("/ready").json() == answer.json()


def test_ready_is_200_when_every_rank_answered(start) -> None:
    with start() as served:
        answer = served.http.get("/ready")
        assert answer.status_code == 200
        assert answer.json()["answered"] == [0]


def test_metrics_count_what_happened(start, tokenizer: Tokenizer, text: str) -> None:
    with start() as served:
        label = f'{{model_name="{NAME}"}}'
        before = samples(served)
        assert before[f"vcli:time_to_first_token_seconds_count{label}"] == 0
        served.post("/v1/completions", prompt="x", max_tokens=5)
        served.post("/v1/completions", prompt="x", max_tokens=100)
        served.post("/v1/completions", prompt="x", max_tokens=100, stop="STOP")
        after = samples(served)
        assert after[f"vcli:time_to_first_token_seconds_count{label}"] == 3
        assert after[f"vcli:e2e_request_latency_seconds_count{label}"] == 3
        assert after[f"vcli:inter_token_latency_seconds_count{label}"] > 10
        success = f'vcli:request_success_total{{finished_reason="%s",model_name="{NAME}"}}'
        assert after[success % "length"] == 1
        assert after[success % "stop"] == 2
        assert after[success % "abort"] == 0
        assert after[f"vcli:num_requests_running{label}"] == 1
        assert after[f"vcli:kv_cache_usage_perc{label}"] == 0.25
        assert after[f"vcli:kv_blocks_free{label}"] == 75
        assert after[f"vcli:kv_blocks_total{label}"] == 100
        assert after[f"vcli:generation_tokens_total{label}"] == served.core.num_generated
        for name in (
            *("num_requests_waiting", "prompt_tokens_total", "prefix_cache_queries_total"),
            *("prefix_cache_hits_total", "computed_prompt_tokens_total", "num_preemptions_total"),
        ):
            assert f"vcli:{name}{label}" in after


def test_first_token_of_all_requests_is_told_once() -> None:
    told: list[str] = []
    metrics = ServerMetrics(NAME, on_first_token=lambda: told.append("first"))
    assert told == []
    for seconds in (0.3, 0.2):
        metrics.first_token(seconds)
    assert told == ["first"]


def test_tokenize_and_detokenize_are_inverse(served: Serving, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello wö")
    answer = served.post("/tokenize", prompt="hello wö", return_token_strs=True).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 200)
    assert answer["token_strs"][0] == "he"
    assert served.post("/detokenize", tokens=ids).json() == {"prompt": "hello wö"}
    messages = [{"role": "user", "content": "x"}]
    chat = served.post("/tokenize", messages=messages).json()
    assert chat["tokens"] == tokenizer.encode_messages(messages)
    assert served.post("/tokenize").status_code == 400
    assert served.post("/detokenize", tokens=[10**6]).json()["error"]["param"] == "tokens"
