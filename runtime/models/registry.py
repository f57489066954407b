"""From a model's shape to the module that computes it."""

from collections.abc import Callable, Mapping

import torch

from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.layers.attention import AttentionBackend
from vcli.runtime.layers.attention_torch import TorchAttention
from vcli.runtime.models.decoder import CausalLM
from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import ModelSpec

#: family of `ModelSpec` -> its class; the families so far differ by flags of the spec alone
MODEL_REGISTRY: Mapping[str, type[CausalLM]] = {
    "llama": CausalLM,
    "qwen2": CausalLM,
    "qwen3": CausalLM,
    "qwen3_moe": CausalLM,
}

#: name in the plan -> back end
ATTENTION_BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {"torch": TorchAttention}


def build_model(
    spec: ModelSpec,
    context: ParallelContext,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    layer_span: tuple[int, int],
    attention: str = "torch",
) -> CausalLM:
    """The layers [start, end) of a model for this rank, with weights not yet filled.

    Raises:
        ConfigError: an unknown family or attention back end, or sizes that TP does not divide.
    """
    family = MODEL_REGISTRY.get(spec.family)
    if family is None:
        raise ConfigError(
            f"model family {spec.family!r} is not supported",
            hint=f"supported: {', '.join(sorted(MODEL_REGISTRY))}",
        )
    backend = ATTENTION_BACKENDS.get(attention)
    if backend is None:
        raise ConfigError(
            f"attention back end {attention!r} is not built in",
            hint=f"built in: {', '.join(sorted(ATTENTION_BACKENDS))}",
        )
    return family(
        spec,
        context,
        dtype=dtype,
        device=torch.device(device),
        layer_span=layer_span,
        attention_backend=backend(),
    ).eval()
