"""Logits of several requests that come, end and move: in CUDA graphs, eager, and one by one.

Without a GPU the same steps run on the CPU, with reruns in the place of graphs.
"""

from functools import cache
from importlib.util import find_spec

import pytest
import torch

from tests.support.forced_steps import ForcedRun, assert_alike
from tests.support.rerun_graphs import rerun_graphs
from tests.support.tiny_model import initial_checkpoint
from tests.support.worker_steps import engine_config
from vcli.runtime.distributed.parallel_state import single_rank_context
from vcli.runtime.models.loader import load_weights
from vcli.runtime.models.registry import build_model
from vcli.runtime.worker.device_runner import DeviceModelRunner
from vcli.runtime.worker.runner_choice import make_runner
from vcli.runtime.worker.step_ops import TorchStepOps

FAMILY = "qwen3"
#: Steps of 3, 5 and 9 requests are padded to graphs of 4, 8 and 16.
PADDED = {3, 5, 9}
#: Steps of these numbers of tokens, prompts among them: one fills its graphs, others pad them.
PROMPTS = {24, 50, 103}
LIMIT = {"float32": 1e-3, "bfloat16": 2e-2}


def on_gpu(test):
    """What a library warns of when its kernels are compiled is not what is tested."""
    marks = (
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        pytest.mark.filterwarnings("default"),
    )
    for mark in marks:
        test = mark(test)
    return test


def skip_without(attention):
    if attention == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")


def parts_of(dtype, *, device="cpu", attention="torch", eager=True):
    """The configuration of one rank, and its loaded model; weights have the digits of bfloat16."""
    folder = initial_checkpoint(FAMILY, "bfloat16")
    config = engine_config(folder, dtype=dtype, device_type=device, enforce_eager=eager)
    model = build_model(
        config.model.spec,
        single_rank_context(),
        dtype=getattr(torch, dtype),
        device="cuda:0" if device == "cuda" else "cpu",
        layer_span=(0, config.model.spec.num_layers),
        attention=attention,
    )
    load_weights(model, folder)
    return config, model


def runner_of(dtype, **options):
    config, model = parts_of(dtype, **options)
    return make_runner(config, model=model, context=single_rank_context(), is_output=True)


def device_runner_on_cpu():
    config, model = parts_of("float32")
    return DeviceModelRunner(
        config, model=model, context=single_rank_context(), is_output=True, ops=TorchStepOps()
    )


@cache
def expected():
    """The float32 CPU, one request after the other."""
    return ForcedRun(runner_of("float32")).alone()


def test_requests_in_batches_have_the_logits_that_they_have_alone():
    assert_alike(ForcedRun(runner_of("float32")).together(), expected(), 1e-4)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_so_they_have_on_a_runner_that_keeps_the_batch_on_its_device(is_late, has_graphs):
    runner = device_runner_on_cpu()
    run = ForcedRun(runner, is_late=is_late)
    if has_graphs:
        rerun_graphs(runner)
    assert_alike(run.together(), expected(), 1e-4)
    assert (set(run.replayed) >= PADDED) == has_graphs
    assert (set(run.prompts) >= PROMPTS) == has_graphs


@cache
def logits_on_gpu(dtype, attention, *, eager, is_late=False):
    runner = runner_of(dtype, device="cuda", attention=attention, eager=eager)
    run = ForcedRun(runner, is_late=is_late)
    try:
        num_graphs = runner.capture_graphs(lambda fraction: None)
        assert (num_graphs > 0) == (not eager)
        logits = run.together()
        assert (set(run.replayed) >= PADDED) == (not eager)
        assert (set(run.prompts) >= PROMPTS) == (not eager)
    finally:
        runner.release()
        torch.cuda.empty_cache()
    return logits


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        ("float32", "torch"),
        ("bfloat16", "torch"),
        ("bfloat16", "triton"),
        pytest.param("bfloat16", "flashinfer", marks=pytest.mark.slow),
    ],
)
def test_eager_batches_on_a_gpu_have_the_logits_of_the_cpu(dtype, attention):
    skip_without(attention)
    assert_alike(logits_on_gpu(dtype, attention, eager=True), expected(), LIMIT[dtype])


@on_gpu
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "attention", ["triton", pytest.param("flashinfer", marks=pytest.mark.slow)]
)
def test_padded_graphs_between_prompts_have_the_logits_of_eager_steps(attention, is_late):
    skip_without(attention)
    found = logits_on_gpu("bfloat16", attention, eager=False, is_late=is_late)
    assert_alike(found, expected(), LIMIT["bfloat16"])
    assert_alike(found, logits_on_gpu("bfloat16", attention, eager=True), LIMIT["bfloat16"])
