"""The worker on a CUDA device: the same tokens as on the CPU, and a measured KV cache."""

import pytest
import torch

from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import GREEDY, StepDriver, engine_config, kv_config
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [300], [17, 18, 19, 20] * 6, [40] * 9, [41] * 9]
SAMPLING = [
    GREEDY,
    SamplingParams(seed=4),
    SamplingParams(seed=5, top_k=30, top_p=0.9, logprobs=2),
    SamplingParams(seed=6, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, min_tokens=4, stop_token_ids=(3,)),
]


def loaded_worker(device_type):
    config = engine_config(tiny_checkpoint(), device_type=device_type)
    worker = Worker(config, 0, rendezvous=None, report=lambda *_: None)
    worker.init_device()
    worker.load_model()
    return worker


def generate(worker):
    worker.initialize_from_config(kv_config())
    worker.compile_or_warm_up_model()
    driver = StepDriver(worker.execute_model, chunk=5)
    sequences = [
        driver.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]
    driver.run()
    return [sequence.generated for sequence in sequences]


def test_tokens_on_the_gpu_equal_those_on_the_cpu():
    worker = loaded_worker("cuda")
    worker.determine_available_memory()
    on_gpu = generate(worker)
    worker.check_health()
    worker.shutdown()
    assert on_gpu == generate(loaded_worker("cpu"))


def test_measured_kv_cache_fits_what_is_free():
    worker = loaded_worker("cuda")
    num_bytes = worker.determine_available_memory()
    free, total = torch.cuda.mem_get_info()
    assert 0 < num_bytes < min(free, 0.9 * total)
    num_blocks = num_bytes // worker.kv_bytes_per_block()
    worker.initialize_from_config(kv_config(num_blocks))
    worker.compile_or_warm_up_model()
    worker.shutdown()
