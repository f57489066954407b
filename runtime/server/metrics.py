"""Prometheus metrics, named as vLLM's are where it has them, with `vcli:` in front."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcli.runtime.messages import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_NEXT_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0),
)
_REQUEST_BUCKETS_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0),
)
#: the reasons that appear from the start, so that a rate over them is defined
_FINISH_REASONS = ("stop", "length", "abort", "error")


class _EngineCollector(Collector):
    """The engine's own numbers, read when somebody asks."""

    def __init__(self, served_name: str, read: Callable[[], SchedulerStats]) -> None:
        self._served_name = served_name
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One family per number."""
        stats = self._read()
        used = stats.num_kv_blocks - stats.num_free_kv_blocks
        gauges = (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests that wait for a place.", stats.num_waiting),
            (
                "kv_cache_usage_perc",
                "Part of the KV blocks in use, 0 to 1.",
                used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0,
            ),
            ("kv_blocks_total", "KV blocks of each rank.", stats.num_kv_blocks),
            ("kv_blocks_free", "KV blocks not in use.", stats.num_free_kv_blocks),
        )
        counters = (
            ("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens_total),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            (
                "computed_prompt_tokens",
                "Prompt tokens computed, not taken from the prefix cache.",
                stats.computed_prompt_tokens_total,
            ),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_query_tokens_total,
            ),
            (
                "prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                stats.prefix_cache_hit_tokens_total,
            ),
            ("num_preemptions", "Requests preempted.", stats.preemptions_total),
            ("engine_steps", "Steps of the engine.", stats.steps_total),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"vcli:{name}", text, labels=["model_name"])
            gauge.add_metric([self._served_name], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"vcli:{name}", text, labels=["model_name"])
            counter.add_metric([self._served_name], value)
            yield counter


class ServerMetrics:
    """Times of requests (a `RequestObserver` for the engine) and the text for /metrics.

    `on_first_token` is called once, when the first request of all has its first token.
    """

    def __init__(
        self, served_name: str = "", *, on_first_token: Callable[[], None] | None = None
    ) -> None:
        self._served_name = served_name
        self._on_first_token = on_first_token
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Request to first token.", _FIRST_TOKEN_BUCKETS_S
        )
        self._next_token = self._histogram(
            "inter_token_latency_seconds", "Token to token.", _NEXT_TOKEN_BUCKETS_S
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Request to last token.", _REQUEST_BUCKETS_S
        )
        finished = Counter(
            "vcli:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {
            reason: finished.labels(served_name, reason) for reason in _FINISH_REASONS
        }

    def watch_engine(self, read: Callable[[], SchedulerStats]) -> None:
        """Add the engine's numbers, which `read` gives."""
        self._registry.register(_EngineCollector(self._served_name, read))

    def first_token(self, seconds: float) -> None:
        """The first token came so long after the request."""
        self._first_token.observe(seconds)
        if self._on_first_token is not None:
            tell, self._on_first_token = self._on_first_token, None
            tell()

    def next_token(self, seconds: float) -> None:
        """So long after the token before."""
        self._next_token.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """A request took so long and ended for `reason`."""
        self._whole.observe(seconds)
        self._finished.get(reason, self._finished["error"]).inc()

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return bytes(generate_latest(self._registry))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"vcli:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
        )
        return family.labels(self._served_name)
