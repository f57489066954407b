"""Logits on GPUs against the float32 CPU: each attention back end, eager and in CUDA graphs."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from tests.support.tiny_model import initial_checkpoint
from tests.support.worker_steps import StepDriver, engine_config, kv_config
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.topology.config import ParallelConfig
from vcli.topology.decision import Decision

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device"),
]

PROMPT = [5, 17, 99, 3, 250, 41, 8]
#: Fed whatever the model would choose: a near tie in bfloat16 must not end the comparison.
CONTINUATION = [(37 * place + 11) % 512 for place in range(24)]


def logits_of(folder, *, tp=1, dtype="float32", device="cpu", attention="torch", eager=True):
    """Logits after the prompt and each token of CONTINUATION; chosen tokens; graphs made."""
    parallel = ParallelConfig(tensor_parallel_size=tp)
    config = engine_config(
        folder,
        parallel=parallel,
        dtype=dtype,
        device_type=device,
        worker_extension_cls="tests.support.logit_recorder.LogitRecorder",
        enforce_eager=eager,
    )
    decision = Decision(name="attention", value=attention, reasons=("the test says so",))
    config = replace(config, plan=replace(config.plan, attention=decision))
    executor = MultiprocExecutor(config, on_message=lambda message: None)
    chosen = []

    def execute(output):
        result = executor.execute_model(output)
        if result.token_ids:
            chosen.extend(result.token_ids)
            result.token_ids[0] = CONTINUATION[len(chosen) - 1]
        return result

    try:
        executor.start()
        executor.initialize_from_config(kv_config())
        executor.compile_or_warm_up_model()
        num_graphs = executor.collective_rpc("num_graphs", unique_reply_rank=0)
        executor.collective_rpc("record_logits")
        driver = StepDriver(execute)
        driver.add(PROMPT, max_tokens=len(CONTINUATION))
        driver.run()
        rows = executor.collective_rpc("recorded_logits", unique_reply_rank=config.plan.output_rank)
    finally:
        executor.shutdown()
    return torch.tensor(rows), chosen, num_graphs


@cache
def reference(family, dtype):
    return logits_of(initial_checkpoint(family, dtype))[:2]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "tp",
    [
        pytest.param(size, marks=pytest.mark.skipif(size > NUM_GPUS, reason=f"needs {size} GPUs"))
        for size in (1, 2, 4, 8)
    ],
)
@pytest.mark.parametrize(
    ("dtype", "attention", "eager", "limit"),
    [
        ("float32", "torch", True, 1e-3),
        ("bfloat16", "torch", True, 2e-2),
        ("bfloat16", "triton", True, 2e-2),
        ("bfloat16", "triton", False, 2e-2),
        ("float16", "triton", False, 1e-2),
        ("bfloat16", "flashinfer", True, 2e-2),
        ("bfloat16", "flashinfer", False, 2e-2),
    ],
)
def test_logits_agree_with_the_cpu_in_float32(family, tp, dtype, attention, eager, limit):
    if attention == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    expected, expected_tokens = reference(family, dtype)
    found, tokens, num_graphs = logits_of(
        initial_checkpoint(family, dtype),
        tp=tp,
        dtype=dtype,
        device="cuda",
        attention=attention,
        eager=eager,
    )
    assert (num_graphs > 0) == (not eager)
    assert found.shape == expected.shape
    difference = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert difference.max() < limit
    if dtype == "float32":
        assert tokens == expected_tokens
