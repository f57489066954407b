"""`--kv-cache-memory` against the machine and against what the requests can use."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.topo_runs import SMOLLM2
from vcli.cli.build import ModelSettings, build_engine_config
from vcli.cli.cache_fit import cache_notes
from vcli.runtime.config import CacheConfig, DeadlineConfig, EngineConfig, SchedulerConfig
from vcli.topology import (
    ConfigError,
    HostFacts,
    ModelSpec,
    ParallelConfig,
    ProcessFacts,
    model_spec_from_config,
)

_GIB = 2**30
_SPEC = model_spec_from_config(SMOLLM2, source="config.json")
#: keys and values of 30 layers with 3 heads of 64, float32
_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4


def _configured(
    asked: int,
    *,
    total: int | None = 64 * _GIB,
    tp: int = 1,
    max_num_seqs: int = 256,
    name: str = "m",
    typed: str | None = None,
    spec: ModelSpec = _SPEC,
    process: ProcessFacts | None = None,
) -> EngineConfig:
    settings = ModelSettings(
        dtype="auto",
        max_model_len=1024 if spec is _SPEC else None,
        served_name=None,
        load_format="safetensors",
        seed=0,
        device="cpu",
        attention_backend="auto",
        enforce_eager=False,
        worker_extension_cls=None,
        log_level="INFO",
        cache=CacheConfig(kv_cache_memory_bytes=asked),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        deadlines=DeadlineConfig(),
        kv_cache_memory=typed,
    )
    return build_engine_config(
        settings,
        ParallelConfig(tensor_parallel_size=tp),
        spec,
        path=Path("/m"),
        name=name,
        host=HostFacts(memory_total_bytes=total),
        process=process or ProcessFacts(),
    )


def test_more_than_the_machine_has_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError) as caught:
        _configured(99 * 2**40, typed="99T")
    assert "--kv-cache-memory 99T (99.0 TiB)" in caught.value.message
    assert "64.0 GiB" in caught.value.message
    assert caught.value.hint == "--kv-cache-memory 16G, or leave it out"


def test_too_little_for_one_request_is_told_as_it_was_typed_with_a_size_to_type() -> None:
    with pytest.raises(ConfigError) as caught:
        _configured(2**20, typed="1M")
    # 1024 tokens of 46,080 bytes
    assert "--kv-cache-memory 1M (1.0 MiB) is too small" in caught.value.message
    assert "needs 45.0 MiB" in caught.value.message
    assert caught.value.hint == "--kv-cache-memory 45M, or --max-model-len 16"


def test_the_ranks_of_a_node_share_its_memory() -> None:
    _configured(40 * _GIB)
    with pytest.raises(ConfigError, match="each of 3 ranks"):
        _configured(40 * _GIB, tp=3)


def test_an_unknown_memory_refuses_nothing() -> None:
    _configured(99 * 2**40, total=None)


def test_what_cannot_be_used_is_told() -> None:
    usable = 1024 * _BYTES_PER_TOKEN * 4
    (line,) = cache_notes(_configured(usable + 1, max_num_seqs=4), "181M")
    assert "--kv-cache-memory 181M (180.0 MiB) is more than can ever be used" in line
    assert "take 180.0 MiB" in line
    assert cache_notes(_configured(usable, max_num_seqs=4)) == ()


@pytest.mark.parametrize("name", ["", "bad\udcff", "two\nlines"])
def test_a_name_that_the_api_cannot_say_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot stand in the API") as caught:
        _configured(_GIB, name=name)
    assert "--served-model-name" in caught.value.hint


def test_a_model_of_one_position_can_answer_nothing() -> None:
    spec = replace(_SPEC, max_position_embeddings=1)
    with pytest.raises(ConfigError, match="the model's 1 positions can answer nothing"):
        _configured(_GIB, spec=spec)


def test_a_back_end_that_only_topo_knows_is_refused_though_nobody_typed_it() -> None:
    process = ProcessFacts(in_ray_placement_group=True)
    with pytest.raises(ConfigError, match="ray: topo plans this; serve does not run it yet"):
        _configured(_GIB, tp=3, process=process)
