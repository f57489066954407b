"""Workers in real processes, joined over gloo: the same tokens as one worker alone."""

import pytest

from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import GREEDY, StepDriver, engine_config, kv_config
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.runtime.executor.uniproc import UniProcExecutor
from vcli.runtime.sampling_params import SamplingParams
from vcli.topology.config import ParallelConfig

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [300], [17, 18, 19, 20] * 6]
SAMPLING = [GREEDY, SamplingParams(seed=4), SamplingParams(seed=5, top_k=30)]


def generate(executor):
    executor.initialize_from_config(kv_config())
    executor.compile_or_warm_up_model()
    driver = StepDriver(executor.execute_model, chunk=5)
    sequences = [
        driver.add(prompt, sampling, max_tokens=6)
        for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]
    driver.run()
    return [sequence.generated for sequence in sequences]


@pytest.mark.process
@pytest.mark.slow
def test_two_stages_of_two_ranks_generate_what_one_worker_does():
    alone = UniProcExecutor(engine_config(tiny_checkpoint()), on_message=lambda _: None)
    alone.start()
    expected = generate(alone)
    alone.shutdown()
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    states = []
    executor = MultiprocExecutor(
        engine_config(tiny_checkpoint(), parallel=parallel), on_message=states.append
    )
    try:
        executor.start()
        free = executor.determine_available_memory()
        assert len(free) == 4
        assert min(free) > 0
        assert generate(executor) == expected
        reports = executor.group_reports()
        assert {(report.kind, tuple(report.ranks)) for report in reports} >= {
            ("TP", (0, 1)), ("TP", (2, 3)), ("PP", (0, 2)), ("PP", (1, 3)),
        }  # fmt: skip
        assert all(report.verified and report.transport == "gloo/tcp" for report in reports)
    finally:
        executor.shutdown()
