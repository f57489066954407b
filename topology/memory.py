"""Parameters and KV cache bytes of each rank, and whether a model fits the sizes.

Exact for the dense families and qwen3_moe, zeros of padding (`padding.py`) included. Activations,
graphs and communicators are not in here.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from vcli.topology.config import divisors, nearest_choices
from vcli.topology.errors import ConfigError
from vcli.topology.experts import num_local_experts, place_experts
from vcli.topology.layers import layer_ranges
from vcli.topology.model_spec import ModelSpec, MoeSpec
from vcli.topology.padding import can_cut_heads, cut_sizes, head_padding
from vcli.topology.sizes import ParallelSizes

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


class LocalHeads(NamedTuple):
    """Attention heads of one TP rank."""

    num_heads: int
    num_kv_heads: int


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number.

    Raises:
        ConfigError: a dtype that weights and KV cache cannot have here.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"dtype={dtype!r} is not supported", hint=f"--dtype: {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]


def local_heads(spec: ModelSpec, tp: int) -> LocalHeads:
    """Heads that one TP rank holds, zero heads included; few KV heads are replicated.

    Raises:
        ConfigError: padding would more than double the KV bytes.
    """
    heads = head_padding(spec, tp)
    return LocalHeads(heads.padded_heads // tp, max(heads.padded_kv_heads // tp, 1))


def valid_tp_sizes(spec: ModelSpec, *, enable_expert_parallel: bool = False) -> tuple[int, ...]:
    """Every TP size that cuts the model without padding, ascending."""
    expert = enable_expert_parallel
    sizes = (
        ParallelSizes(tensor_parallel_size=tp, is_moe=spec.is_moe, enable_expert_parallel=expert)
        for tp in divisors(spec.num_heads)
        if can_cut_heads(spec, tp)
    )
    return tuple(size.tp for size in sizes if cut_sizes(spec, size) == spec.own_sizes)


def check_model_fits(spec: ModelSpec, parallel: ParallelSizes) -> None:
    """Whether the model can be cut into these sizes.

    Raises:
        ConfigError: the rule that is broken, with the nearest valid sizes in the hint.
    """
    if parallel.enable_expert_parallel and not spec.is_moe:
        raise ConfigError(
            f"expert parallelism needs a model with experts, {spec.architecture} has none",
            hint="leave out --enable-expert-parallel",
        )
    if parallel.is_external_lb and not spec.is_moe:
        raise ConfigError(
            f"replicas of a dense model ({spec.architecture}) are independent: external load "
            "balancing does not join them",
            hint="start each as an instance of its own, without data-parallel flags",
        )
    if spec.moe is not None and parallel.enable_expert_parallel:
        _check_experts(spec.moe, parallel)
    head_padding(spec, parallel.tp)
    layer_ranges(spec.num_layers, parallel.pp, parallel.pp_layer_partition)
    _check_decode_context(spec, parallel)


def layer_parameters(spec: ModelSpec, parallel: ParallelSizes) -> int:
    """Those of the matrices of one layer without experts on one rank."""
    mlp = _dense_mlp_parameters(spec, cut_sizes(spec, parallel).intermediate_size // parallel.tp)
    return _attention_parameters(spec, parallel.tp) + mlp


def num_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model, tied embeddings counted once."""
    single = ParallelSizes(is_moe=spec.is_moe)
    return rank_parameters(spec, single, pp_rank=0, ep_rank=0)


def rank_parameters(spec: ModelSpec, parallel: ParallelSizes, *, pp_rank: int, ep_rank: int) -> int:
    """Parameters that one rank holds, replicas included.

    The first stage has the embedding, the last the final norm and the LM head. Tied embeddings are
    one tensor on a single stage; with more stages the last one has a copy.
    """
    tp = parallel.tp
    layers = layer_ranges(spec.num_layers, parallel.pp, parallel.pp_layer_partition)[pp_rank]
    cut = cut_sizes(spec, parallel)
    attention = _attention_parameters(spec, tp)
    dense_mlp = _dense_mlp_parameters(spec, cut.intermediate_size // tp)
    total = len(layers) * (attention + 2 * spec.hidden_size)
    if spec.moe is None:
        total += len(layers) * dense_mlp
    else:
        sparse = _sparse_mlp_parameters(spec, spec.moe, parallel, ep_rank)
        total += sum(sparse if spec.moe.is_sparse_layer(layer) else dense_mlp for layer in layers)
    embedding = cut.vocab_size // tp * spec.hidden_size
    is_first, is_last = pp_rank == 0, pp_rank == parallel.pp - 1
    if is_first:
        total += embedding
    if is_last:
        total += spec.hidden_size
        if not (spec.tie_word_embeddings and is_first):
            total += embedding
    return total


def weight_bytes(
    spec: ModelSpec, parallel: ParallelSizes, *, pp_rank: int, ep_rank: int, dtype: str
) -> int:
    """Bytes of the weights that one rank holds."""
    count = rank_parameters(spec, parallel, pp_rank=pp_rank, ep_rank=ep_rank)
    return count * dtype_bytes(dtype)


def kv_bytes_per_token(
    spec: ModelSpec, parallel: ParallelSizes, *, pp_rank: int, dtype: str
) -> int:
    """KV cache bytes that one token of a sequence takes on one rank.

    With decode context parallelism a rank stores only each dcp-th token; this is the average,
    rounded up.
    """
    layers = layer_ranges(spec.num_layers, parallel.pp, parallel.pp_layer_partition)[pp_rank]
    heads = local_heads(spec, parallel.tp).num_kv_heads
    total = 2 * heads * spec.head_size * len(layers) * dtype_bytes(dtype)
    return -(-total // parallel.dcp)


def _attention_parameters(spec: ModelSpec, tp: int) -> int:
    heads = local_heads(spec, tp)
    q_size = heads.num_heads * spec.head_size
    kv_size = heads.num_kv_heads * spec.head_size
    total = spec.hidden_size * (q_size + 2 * kv_size) + q_size * spec.hidden_size
    if spec.has_qkv_bias:
        total += q_size + 2 * kv_size
    if spec.has_output_bias:
        total += spec.hidden_size
    if spec.has_qk_norm:
        total += 2 * spec.head_size
    return total


def _dense_mlp_parameters(spec: ModelSpec, local_size: int) -> int:
    bias = 2 * local_size + spec.hidden_size if spec.has_mlp_bias else 0
    return 3 * spec.hidden_size * local_size + bias


def _sparse_mlp_parameters(
    spec: ModelSpec, moe: MoeSpec, parallel: ParallelSizes, ep_rank: int
) -> int:
    router = spec.hidden_size * moe.num_experts
    if parallel.enable_expert_parallel:
        physical = moe.num_experts + parallel.num_redundant_experts
        num_local = num_local_experts(physical, parallel.expert_parallel_size, ep_rank)
        local_size = moe.intermediate_size
    else:
        num_local = moe.num_experts
        local_size = cut_sizes(spec, parallel).moe_intermediate_size // parallel.tp
    return router + num_local * 3 * spec.hidden_size * local_size


def _check_experts(moe: MoeSpec, parallel: ParallelSizes) -> None:
    ep_size = parallel.dp * parallel.pcp * parallel.tp
    physical = moe.num_experts + parallel.num_redundant_experts
    place_experts(physical, ep_size)
    if parallel.enable_eplb and physical % ep_size:
        missing = -physical % ep_size
        raise ConfigError(
            f"expert load balancing needs as many experts on each of {ep_size} ranks, "
            f"{moe.num_experts} + {parallel.num_redundant_experts} redundant do not divide",
            hint=f"--num-redundant-experts {parallel.num_redundant_experts + missing}",
        )


def _check_decode_context(spec: ModelSpec, parallel: ParallelSizes) -> None:
    # Context parallelism over PCP ranks is free; over TP ranks it uses up KV head replicas.
    over_tp = parallel.dcp // parallel.pcp if parallel.pcp > 1 else parallel.dcp
    if over_tp <= 1:
        return
    heads = head_padding(spec, parallel.tp)
    replicas = parallel.tp // heads.padded_kv_heads
    per_kv_head = heads.padded_heads // heads.padded_kv_heads
    if over_tp > replicas or per_kv_head % over_tp:
        valid = [size for size in divisors(max(replicas, 1)) if per_kv_head % size == 0]
        raise ConfigError(
            f"decode context parallelism over {over_tp} TP ranks needs as many replicas of each KV "
            f"head and query heads that divide: tensor parallel size {parallel.tp}, "
            f"{heads.padded_kv_heads} KV heads with {per_kv_head} query heads each",
            hint=f"--decode-context-parallel-size: {nearest_choices(over_tp, valid)}",
        )
