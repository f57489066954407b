"""Run by torchrun in every rank: an engine of its own; prints the tokens and what calls gave."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.support.worker_steps import engine_config
from vcli.runtime.config import CacheConfig
from vcli.runtime.core.engine_core import EngineCore
from vcli.runtime.errors import FailedWithOutput, WorkerError
from vcli.runtime.executor.base import RankReply
from vcli.runtime.executor.external_launcher import ExternalLauncherExecutor
from vcli.runtime.executor.launched_rank import launched_rank
from vcli.runtime.messages import EngineRequest
from vcli.runtime.sampling_params import SamplingParams
from vcli.topology.config import ParallelConfig

PROMPTS = {
    "greedy": ([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8)),
    "seeded": ([17, 18, 19, 20] * 6, SamplingParams(seed=4, max_tokens=8)),
    "any": ([300], SamplingParams(max_tokens=8)),
}


def main(folder: Path, tp: int, pp: int) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        distributed_executor_backend="external_launcher",
    )
    config = engine_config(
        folder,
        parallel=parallel,
        cache=CacheConfig(block_size=4, kv_cache_memory_bytes=4 << 20),
    )
    config = replace(config, launched=launched_rank(os.environ))
    executor = ExternalLauncherExecutor(config, on_message=lambda _: None)
    executor.start()
    engine = EngineCore(config, executor)
    for request_id, (prompt, sampling) in PROMPTS.items():
        engine.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        )
    tokens: dict[str, list[int]] = {request_id: [] for request_id in PROMPTS}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    result = {
        "rank": config.launched.rank,
        "tokens": tokens,
        "ranks": executor.collective_rpc(lambda worker: worker.rank),
        "large": len(executor.collective_rpc(lambda worker: "x" * 9000, unique_reply_rank=1)),
        "sum": executor.collective_rpc(
            lambda worker: worker.rank, aggregate=lambda replies: sum(r.value for r in replies)
        ),
        "handed_on": executor.collective_rpc(_hand_on_of_one, aggregate=_values),
        "groups": sorted(report.kind for report in executor.group_reports()),
        "error": _error_of(executor),
    }
    # At once, so that two ranks do not write into each other's line.
    os.write(1, f"RESULT {json.dumps(result)}\n".encode())
    executor.shutdown()


def _hand_on_of_one(worker) -> str:
    if worker.rank == 1:
        raise FailedWithOutput("failed on rank 1", {"saved": 1})
    return "done"


def _values(replies: Sequence[RankReply]) -> list[object]:
    return [[reply.value, reply.failure and reply.failure.rank] for reply in replies]


def _error_of(executor: ExternalLauncherExecutor) -> str:
    def fail_on_one(worker) -> None:
        if worker.rank == 1:
            raise ValueError("only here")

    try:
        executor.collective_rpc(fail_on_one)
    except WorkerError as error:
        return error.message
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
