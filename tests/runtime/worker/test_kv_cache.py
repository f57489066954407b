"""A KV cache that memory cannot hold names the flags that matter on its device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vcli.runtime.worker.kv_cache import allocate_kv_caches
from vcli.topology.errors import UnfitError


def test_a_cache_beyond_memory_names_the_flag_of_the_cpu() -> None:
    layer: Any = SimpleNamespace(num_kv_heads=1, head_size=1)
    with pytest.raises(UnfitError) as caught:
        allocate_kv_caches(
            [layer],
            num_blocks=2**50,
            block_size=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    assert caught.value.hint == "lower --kv-cache-memory"
