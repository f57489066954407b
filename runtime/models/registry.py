"""From a model's shape to the module that computes it."""

from collections.abc import Mapping

import torch

from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.layers.attention import AttentionBackend
from vcli.runtime.layers.attention_torch import TorchAttention
from vcli.runtime.layers.ops import TORCH_OPS, LayerOps
from vcli.runtime.layers.share import head_shares
from vcli.runtime.models.decoder import CausalLM
from vcli.topology.attention import ATTENTION_BACKENDS
from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import ModelSpec

#: family of `ModelSpec` -> its class; the families so far differ by flags of the spec alone
MODEL_REGISTRY: Mapping[str, type[CausalLM]] = {
    "llama": CausalLM,
    "qwen2": CausalLM,
    "qwen3": CausalLM,
    "qwen3_moe": CausalLM,
}


def make_attention(
    name: str, spec: ModelSpec, group: GroupHandle, *, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The back end `name`; its library is loaded by what uses it.

    Raises:
        ConfigError: there is none of this name.
    """
    if name == "torch":
        return TorchAttention()
    heads = head_shares(spec, group)
    if name == "triton":
        from vcli.runtime.layers.attention_triton import TritonAttention

        return TritonAttention(
            num_heads=heads.query.size,
            num_kv_heads=heads.kv.size,
            head_size=spec.head_size,
            dtype=dtype,
        )
    if name == "flashinfer":
        from vcli.runtime.layers.attention_flashinfer import FlashInferAttention

        return FlashInferAttention(
            num_heads=heads.query.size,
            num_kv_heads=heads.kv.size,
            head_size=spec.head_size,
            dtype=dtype,
            device=device,
        )
    raise ConfigError(
        f"attention back end {name!r} is not built in",
        hint=f"built in: {', '.join(ATTENTION_BACKENDS)}",
    )


def layer_ops(attention: str) -> LayerOps:
    """The operations between the products that go with an attention back end."""
    if attention == "torch":
        return TORCH_OPS
    from vcli.runtime.layers.ops_triton import TritonOps

    return TritonOps()


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
    device = torch.device(device)
    return family(
        spec,
        context,
        dtype=dtype,
        device=device,
        layer_span=layer_span,
        attention_backend=make_attention(attention, spec, context.tp, dtype=dtype, device=device),
        ops=layer_ops(attention),
    ).eval()
