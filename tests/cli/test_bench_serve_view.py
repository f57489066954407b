"""The table of `vcli bench serve`."""

from vcli.cli.views.bench_serve import serve_table
from vcli.runtime.bench.http_client import parse_base_url
from vcli.runtime.bench.serve import ServeBenchResult
from vcli.runtime.bench.serve_spec import ServeBenchSpec
from vcli.runtime.bench.stats import host_facts


def test_the_table_says_how_many_tokens_each_request_has_and_how_prompts_were_sent() -> None:
    spec = ServeBenchSpec(
        endpoint="completions",
        num_prompts=3,
        input_len=512,
        output_len=64,
        request_rate=float("inf"),
        max_concurrency=None,
        request_timeout_s=20.0,
        temperature=0.0,
        vocab_size=100,
        seed=0,
    )
    address = parse_base_url("http://127.0.0.1:8000")
    known = ServeBenchResult(spec=spec, model="m", prompts="tokens")
    table = serve_table(host_facts(), address, known, width=100)
    assert "512 prompt tokens each (sent as tokens), 64 output tokens" in table
    stopped = serve_table(host_facts(), address, ServeBenchResult(spec=spec), width=100)
    assert "512 prompt tokens each, 64 output tokens" in stopped
