"""What one step costs beside the model: scheduling, control plane, result; with fake workers.

    python benchmarks/step_overhead.py [--steps 2000] [--requests 1 32 256]

For each back end and number of running requests: microseconds for a step, median of the rounds.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.fake_worker import fake_config
from vcli.runtime.config import EngineConfig, SchedulerConfig
from vcli.runtime.core.engine_core import EngineCore
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.executor.base import Executor
from vcli.runtime.messages import EngineRequest
from vcli.runtime.sampling_params import SamplingParams

ROUNDS = 5


def measure(
    backend: str, num_ranks: int, num_requests: int, num_steps: int, **options: bool
) -> float:
    """Median microseconds of a step that decodes `num_requests` requests."""
    config = fake_config(
        num_ranks,
        scheduler=SchedulerConfig(max_num_seqs=256, **options),
    )
    executor = get_executor_class(backend)(
        config, on_message=lambda _: None, worker_cls="tests.support.fake_worker:SamplingWorker"
    )
    executor.start()
    try:
        rounds = [_round(config, executor, num_requests, num_steps) for _ in range(ROUNDS)]
    finally:
        executor.shutdown()
    return statistics.median(rounds)


def _round(config: EngineConfig, executor: Executor, num_requests: int, num_steps: int) -> float:
    engine = EngineCore(config, executor)
    for index in range(num_requests):
        engine.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=[1, 2, 3],
                sampling=SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True),
            )
        )
    engine.step()
    num_done, begin_s = 0, time.perf_counter()
    while engine.has_unfinished and num_done < num_steps:
        engine.step()
        num_done += 1
    seconds = time.perf_counter() - begin_s
    engine.abort_requests(engine.scheduler.unfinished_ids())
    while engine.oldest_step is not None:
        engine.finish_step()
    return seconds / num_done * 1e6


def main() -> None:
    """Measure all of them and print a JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--async-scheduling", choices=["on", "off", "unset"], default="unset")
    arguments = parser.parse_args()
    options = {}
    if arguments.async_scheduling != "unset":
        options["async_scheduling"] = arguments.async_scheduling == "on"
    for backend, num_ranks in (("uni", 1), ("mp", 1), ("mp", 2)):
        for num_requests in arguments.requests:
            us = measure(backend, num_ranks, num_requests, arguments.steps, **options)
            row = {
                "backend": backend,
                "tp": num_ranks,
                "requests": num_requests,
                "us": round(us, 1),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
