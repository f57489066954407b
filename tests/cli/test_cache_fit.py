"""`--kv-cache-memory` against the machine and against what the requests can use."""

from pathlib import Path

import pytest

from tests.support.topo_runs import SMOLLM2
from vcli.cli.build import ModelSettings, build_engine_config
from vcli.cli.cache_fit import cache_notes
from vcli.runtime.config import CacheConfig, DeadlineConfig, EngineConfig, SchedulerConfig
from vcli.topology import (
    ConfigError,
    HostFacts,
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
) -> EngineConfig:
    settings = ModelSettings(
        dtype="auto",
        max_model_len=1024,
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
    )
    return build_engine_config(
        settings,
        ParallelConfig(tensor_parallel_size=tp),
        _SPEC,
        path=Path("/m"),
        name=name,
        host=HostFacts(memory_total_bytes=total),
        process=ProcessFacts(),
    )


def test_more_than_the_machine_has_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError) as caught:
        _configured(99 * 2**40)
    assert str(99 * 2**40) in caught.value.message
    assert str(64 * _GIB) in caught.value.message


def test_the_ranks_of_a_node_share_its_memory() -> None:
    _configured(40 * _GIB)
    with pytest.raises(ConfigError, match="each of 3 ranks"):
        _configured(40 * _GIB, tp=3)


def test_an_unknown_memory_refuses_nothing() -> None:
    _configured(99 * 2**40, total=None)


def test_what_cannot_be_used_is_told() -> None:
    usable = 1024 * _BYTES_PER_TOKEN * 4
    (line,) = cache_notes(_configured(usable + 1, max_num_seqs=4))
    assert str(usable + 1) in line
    assert str(usable) in line
    assert cache_notes(_configured(usable, max_num_seqs=4)) == ()


@pytest.mark.parametrize("name", ["", "bad\udcff", "two\nlines"])
def test_a_name_that_the_api_cannot_say_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot stand in the API") as caught:
        _configured(_GIB, name=name)
    assert "--served-model-name" in caught.value.hint
