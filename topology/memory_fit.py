"""How many tokens the KV cache of a rank can hold, from the bytes of its device.

The weights and the bytes of a token are exact (`memory.py`); what activations and libraries take
beside them is an estimate, named as such.
"""

from dataclasses import dataclass
from typing import Final

from vcli.topology.graph_sizes import graph_sizes, prompt_graph_sizes
from vcli.topology.layers import layer_ranges
from vcli.topology.memory import dtype_bytes, local_heads
from vcli.topology.model_spec import ModelSpec
from vcli.topology.padding import cut_sizes
from vcli.topology.sizes import ParallelSizes

_MIB: Final = 1 << 20
#: CUDA context and kernels' code on a GPU, before anything is allocated.
GPU_CONTEXT_BYTES: Final = 600 * _MIB
#: What libraries take outside torch's allocator once they are used.
GPU_LIBRARY_BYTES: Final = 200 * _MIB
#: Left free besides everything counted, however large the allowed part is.
GPU_RESERVE_BYTES: Final = 150 * _MIB
#: What the driver keeps of a layer's kernels in one CUDA graph: about ten of them, 12 KiB each.
GRAPH_LAYER_BYTES: Final = 120 << 10
#: The same where the layer is a graph of its own.
GRAPH_PIECE_BYTES: Final = 200 << 10
#: Workspace of cuBLAS for the stream on which graphs are captured.
GRAPH_WORKSPACE_BYTES: Final = 32 * _MIB
#: Bytes for each logit of a step while it is sampled with top-p: the logits and a copy in float32,
#: sorted values with their places (4 + 8), and what the sort itself needs.
SAMPLING_BYTES: Final = 40
#: Part of a CPU node's free memory that the KV caches of all its ranks may fill.
CPU_CACHE_PART: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """The KV cache of one rank; `num_tokens` is what fits, 0 if the weights alone do not."""

    device_bytes: int
    weight_bytes: int
    other_bytes: int
    kv_bytes: int
    block_size: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Tokens in whole blocks."""
        return self.num_blocks * self.block_size


def activation_bytes(
    spec: ModelSpec, parallel: ParallelSizes, *, dtype: str, num_tokens: int, num_requests: int
) -> int:
    """An estimate of the most that the activations of a step of `num_tokens` take on a rank.

    The larger of two moments. In a layer: residual and hidden states, queries, keys and values, the
    two halves of the MLP and their product. At the end: a row of logits for each request, which
    takes `SAMPLING_BYTES` for each of them while it is sampled.
    """
    heads = local_heads(spec, parallel.tp)
    attention = (2 * heads.num_heads + 2 * heads.num_kv_heads) * spec.head_size
    cut = cut_sizes(spec, parallel)
    width = cut.intermediate_size // parallel.tp
    if spec.moe is not None:
        width = max(width, spec.moe.num_experts_per_token * spec.moe.intermediate_size)
    number = dtype_bytes(dtype)
    per_token = (3 * spec.hidden_size + max(attention, 3 * width)) * number
    return max(num_tokens * per_token, num_requests * cut.vocab_size * SAMPLING_BYTES)


def graph_bytes(
    spec: ModelSpec,
    parallel: ParallelSizes,
    *,
    dtype: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """An estimate of what CUDA graphs take on a rank; 0 where there are none.

    Each graph keeps its kernels. Those of decode steps share the logits and the activations of the
    largest one, those of steps with prompts the activations.
    """
    if parallel.pp > 1 or spec.is_moe:
        return 0
    sizes = graph_sizes(max_num_seqs)
    num_layers = len(layer_ranges(spec.num_layers, parallel.pp, None)[0])
    kernels = len(sizes) * num_layers * GRAPH_LAYER_BYTES
    cut, number = cut_sizes(spec, parallel), dtype_bytes(dtype)
    logits = sizes[-1] * (cut.vocab_size // parallel.tp) * number
    width = max(cut.intermediate_size // parallel.tp, spec.hidden_size)
    activations = sizes[-1] * 3 * (spec.hidden_size + width) * number
    decodes = kernels + logits + activations + GRAPH_WORKSPACE_BYTES
    return decodes + _prompt_graph_bytes(spec, parallel, number, max_num_batched_tokens)


def _prompt_graph_bytes(
    spec: ModelSpec, parallel: ParallelSizes, number: int, max_num_batched_tokens: int
) -> int:
    sizes = prompt_graph_sizes(spec, parallel, max_num_batched_tokens)
    if not sizes:
        return 0
    heads = local_heads(spec, parallel.tp)
    queries = heads.num_heads * spec.head_size
    width = cut_sizes(spec, parallel).intermediate_size // parallel.tp
    # Between graphs: queries, what attention gave, the residual. Within one: two hidden states,
    # and the halves of the MLP with their product.
    per_token = 2 * queries + 3 * spec.hidden_size + 3 * width
    kernels = len(sizes) * spec.num_layers * GRAPH_PIECE_BYTES
    return kernels + sizes[-1] * per_token * number + GRAPH_WORKSPACE_BYTES


def gpu_kv_budget(
    *,
    memory_bytes: int,
    utilization: float,
    weight_bytes: int,
    activation_bytes: int,
    kv_bytes_per_token: int,
    block_size: int,
    graph_bytes: int = 0,
    free_bytes: int | None = None,
) -> KvBudget:
    """What a GPU of `memory_bytes` leaves for KV, of which `free_bytes` are free (None: all).

    The allowed part pays for weights, activations, graphs and libraries; beside it, context and
    reserve must find room in what is free.
    """
    used = weight_bytes + activation_bytes + graph_bytes
    free = memory_bytes if free_bytes is None else free_bytes
    by_part = int(memory_bytes * utilization) - used - GPU_LIBRARY_BYTES
    by_free = free - used - GPU_CONTEXT_BYTES - GPU_RESERVE_BYTES
    left = max(0, min(by_part, by_free))
    other = activation_bytes + graph_bytes + GPU_LIBRARY_BYTES
    return _budget(
        device=memory_bytes,
        weights=weight_bytes,
        other=other,
        kv=left,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=block_size,
    )


def cpu_kv_budget(
    *,
    free_bytes: int,
    ranks_on_node: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    block_size: int,
) -> KvBudget:
    """The share of one of `ranks_on_node` in what a CPU node has free once weights are loaded.

    The weights of all ranks of the node are taken off `free_bytes` first.
    """
    rest = max(0, free_bytes - weight_bytes * ranks_on_node)
    share = int(rest * CPU_CACHE_PART) // ranks_on_node
    return _budget(
        device=free_bytes,
        weights=weight_bytes,
        other=0,
        kv=share,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=block_size,
    )


def _budget(
    *, device: int, weights: int, other: int, kv: int, kv_bytes_per_token: int, block_size: int
) -> KvBudget:
    block_bytes = kv_bytes_per_token * block_size
    return KvBudget(
        device_bytes=device,
        weight_bytes=weights,
        other_bytes=other,
        kv_bytes=kv,
        block_size=block_size,
        num_blocks=kv // block_bytes if block_bytes else 0,
    )
