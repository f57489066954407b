"""Model runners of several ranks as threads of this process: tensor and pipeline parallel."""

from functools import cache, partial

import pytest
import torch

from tests.support.model_steps import run_ranks
from tests.support.tiny_model import VOCAB_SIZE, tiny_checkpoint
from tests.support.worker_steps import GREEDY, StepDriver, engine_config, kv_config
from vcli.runtime.distributed.parallel_state import context_of_groups, single_rank_context
from vcli.runtime.distributed.virtual import virtual_groups
from vcli.runtime.models.loader import load_weights
from vcli.runtime.models.registry import build_model
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.model_runner import ModelRunner
from vcli.runtime.worker.sampler import LogitsError
from vcli.topology.config import ParallelConfig

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [300], [17, 18, 19, 20] * 6]
SAMPLING = [GREEDY, SamplingParams(seed=4), SamplingParams(seed=5, top_k=30)]


def runner_of(config, context, rank):
    plan = config.plan.rank_plan(rank)
    model = build_model(
        config.model.spec,
        context,
        dtype=torch.float32,
        device="cpu",
        layer_span=plan.layer_span,
    )
    load_weights(model, config.model.path)
    runner = ModelRunner(config, model=model, context=context, is_output=plan.is_output)
    runner.initialize_kv_cache(kv_config())
    return runner


def contexts_of(tp, pp):
    """Contexts of all ranks, TP fastest, whose groups are threads."""
    tp_groups = [virtual_groups("TP", tp) for _ in range(pp)]
    pp_groups = [virtual_groups("PP", pp) for _ in range(tp)]
    return [
        context_of_groups(
            rank=stage * tp + rank,
            world_size=tp * pp,
            groups=(tp_groups[stage][rank], pp_groups[rank][stage]),
        )
        for stage in range(pp)
        for rank in range(tp)
    ]


def generate(execute, **options):
    driver = StepDriver(execute, chunk=5, **options)
    sequences = [
        driver.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]
    driver.run()
    return [sequence.generated for sequence in sequences]


@cache
def single_rank_tokens():
    return generate(runner_of(engine_config(tiny_checkpoint()), single_rank_context(), 0).execute)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_ranks_together_generate_what_one_rank_does(tp, pp, defer):
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    config = engine_config(tiny_checkpoint(), parallel=parallel)
    runners = [runner_of(config, context, rank) for rank, context in enumerate(contexts_of(tp, pp))]

    def on_all_ranks(call):
        results = run_ranks([partial(call, runner) for runner in runners])
        output = results.pop(config.plan.output_rank)
        assert results == [None] * len(results)
        return output

    def execute(output):
        run_ranks([partial(runner.dummy_step, [3, 1]) for runner in runners])
        result = on_all_ranks(lambda runner: runner.execute(output))
        if not defer:
            return result
        assert result is None
        return on_all_ranks(lambda runner: runner.sample_deferred(None))

    assert generate(execute, defer=defer) == single_rank_tokens()


def test_only_rows_that_sample_reach_the_head(monkeypatch):
    runner = runner_of(engine_config(tiny_checkpoint()), single_rank_context(), 0)
    widths = []
    compute_logits = runner.model.compute_logits

    def counted(hidden):
        widths.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(runner.model, "compute_logits", counted)
    driver = StepDriver(runner.execute, chunk=4)
    driver.add([1, 2, 3], max_tokens=2)
    driver.add([1] * 10, max_tokens=1)
    driver.run()
    # Steps: one whole prompt and a chunk; a decode and a chunk; the last chunk; nothing.
    assert widths == [1, 1, 1]


def test_nan_of_the_model_names_the_request_and_the_step():
    runner = runner_of(engine_config(tiny_checkpoint()), single_rank_context(), 0)
    with torch.no_grad():
        runner.model.embed_tokens.weight[VOCAB_SIZE - 1] = float("nan")
    driver = StepDriver(runner.execute)
    driver.add([1, 2, 3])
    bad = driver.add([4, VOCAB_SIZE - 1])
    with pytest.raises(LogitsError) as caught:
        driver.step()
    assert f"request {bad.number} in step 0" in caught.value.message
    assert "request 100 " not in caught.value.message
