"""Logits of real worker processes at every step equal those of transformers, at TP 2 and 4."""

import pytest
import torch

from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import StepDriver, engine_config, kv_config
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.topology.config import ParallelConfig

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROMPT = [5, 17, 99, 3, 250, 41, 8]
NUM_TOKENS = 24


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (2, 2)], ids=["tp2", "tp4", "tp2pp2"])
def test_logits_at_every_step_are_those_of_transformers(
    family: str, layout: tuple[int, int]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    with torch.no_grad():
        tokens = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )[0]
        expected = reference(tokens[None]).logits[0, len(PROMPT) - 1 : -1]

    tp, pp = layout
    config = engine_config(
        folder,
        parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        worker_extension_cls="tests.support.logit_recorder.LogitRecorder",
    )
    executor = MultiprocExecutor(config, on_message=lambda message: None)
    try:
        executor.start()
        executor.initialize_from_config(kv_config())
        executor.collective_rpc("record_logits")
        driver = StepDriver(executor.execute_model)
        sequence = driver.add(PROMPT, max_tokens=NUM_TOKENS)
        driver.run()
        rank = config.plan.output_rank
        rows = executor.collective_rpc("recorded_logits", unique_reply_rank=rank)
    finally:
        executor.shutdown()

    assert sequence.generated == tokens[len(PROMPT) :].tolist()
    found = torch.tensor(rows)
    assert found.shape == expected.shape
    difference = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert difference.max() < 1e-4
