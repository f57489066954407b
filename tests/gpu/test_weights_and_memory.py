"""On GPUs: weights through pinned buffers, the plan of the memory against what was measured."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.weight_files import stored_weights
from tests.support.worker_steps import engine_config
from vcli.diagnostics.gpu import collect_gpus
from vcli.runtime.config import CacheConfig, SchedulerConfig
from vcli.runtime.layers.weights import WeightSlice, whole_tensor
from vcli.runtime.messages import KVCacheConfig
from vcli.runtime.models import weight_reader
from vcli.runtime.models.weight_reader import read_weights
from vcli.runtime.worker.worker import Worker
from vcli.topology import HostFacts, plan_topology
from vcli.topology.devices import choose_devices, composed_variable
from vcli.topology.rank_memory import MemoryItems, differences, plan_rank_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROOT = Path(__file__).parents[2]
#: About a billion parameters, so that no item is lost in the tolerance.
CONFIG = """{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048,
"intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 16,
"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096,
"rms_norm_eps": 1e-6, "tie_word_embeddings": true, "torch_dtype": "bfloat16"}"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_gets_the_weights_that_a_cpu_gets(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 1 << 16)
    path = tmp_path / "m.safetensors"
    stored = {"w": torch.randn(700, 3000).bfloat16(), "v": torch.randn(5000).bfloat16()}
    save_file(stored, path)
    found = []
    for device in ("cpu", "cuda:0"):
        shapes = ((701, 1000), (5000,), (100, 3000), (700, 2500))
        targets = [torch.full(shape, float("nan"), dtype=dtype, device=device) for shape in shapes]
        sources = {
            0: (slice(0, 700), slice(1000, 2000)),
            2: (slice(600, 700), slice(0, 3000)),
            3: (slice(0, 700), slice(500, 3000)),
        }
        slices = [
            WeightSlice(name="w", shape=(700, 3000), source=source, target=targets[place])
            for place, source in sources.items()
        ]
        slices.append(whole_tensor("v", targets[1]))
        read_weights(stored_weights(path, slices), torch.device(device), on_elements=lambda _: None)
        found.append([target.cpu() for target in targets])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    # The padding, which no source is for.
    assert not found[1][0][700].any()


def print_memory(folder):
    """Start a worker as a server would, and print what was planned and measured as JSON."""
    (folder / "config.json").write_text(CONFIG)
    config = engine_config(folder, dtype="bfloat16", device_type="cuda", load_format="dummy")
    model = replace(config.model, max_model_len=4096)
    config = replace(config, model=model, scheduler=SchedulerConfig(), cache=CacheConfig())
    seen = collect_gpus(os.environ)
    host = HostFacts(gpus=seen.gpus, links=seen.links)
    plan = plan_topology(
        config.parallel, host=host, model=config.model.spec, dtype="bfloat16", device_type="cuda"
    )
    config = replace(config, plan=plan)
    config = replace(config, memory_plan=plan_rank_memory(plan, config.memory_limits, host))
    worker = Worker(config, 0, rendezvous=None, report=lambda *_: None)
    try:
        worker.init_device()
        worker.load_model()
        num_bytes = worker.determine_available_memory()
        blocks = min(
            num_bytes // worker.kv_bytes_per_block(),
            -(-config.model.max_model_len // config.cache.block_size)
            * config.scheduler.max_num_seqs,
        )
        worker.initialize_from_config(
            KVCacheConfig(num_blocks=blocks, block_size=config.cache.block_size)
        )
        worker.compile_or_warm_up_model()
        report = worker.memory_report()
    finally:
        worker.shutdown()
    print(
        json.dumps(
            {
                "planned": report.planned,
                "measured": report.measured,
                "is_right_device": report.device_uuid == seen.gpus[0].uuid,
            }
        )
    )


def test_the_plan_of_the_memory_is_what_is_measured(tmp_path):
    # In a process of its own: the context of this one would be no part of what is measured.
    code = (
        "import sys; from pathlib import Path; from tests.gpu import test_weights_and_memory as t; "
        "t.print_memory(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        timeout=180, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["is_right_device"]
    planned, measured = MemoryItems(**found["planned"]), MemoryItems(**found["measured"])
    assert list(differences(planned, measured)) == []


def test_children_see_the_chosen_gpu_first():
    seen = collect_gpus(os.environ)
    last = len(seen.gpus) - 1
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = choose_devices(HostFacts(gpus=seen.gpus), str(last), variable=variable)
    code = (
        "import torch; print(torch.cuda.get_device_properties(0).uuid, torch.cuda.device_count())"
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": composed_variable(chosen, variable)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert done.stdout.split() == [seen.gpus[last].uuid.removeprefix("GPU-"), "1"]
