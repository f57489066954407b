"""FIT, RDV: whether weights and cache fit the devices, and the layout the nodes."""

from typing import Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.checks.fit import NO_MODEL
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.text import size_text
from vcli.topology import MemoryPlan, ModelSpec
from vcli.topology.hardware import gpus_without
from vcli.topology.memory_fit import (
    KvBudget,
    activation_bytes,
    cpu_kv_budget,
    gpu_kv_budget,
    graph_bytes,
)

#: The defaults of `serve`, by which the estimate is made.
GPU_PART: Final = 0.9
STEP_TOKENS: Final = 2048
STEP_REQUESTS: Final = 128
BLOCK_SIZE: Final = 16

#: Slower links make tensor parallelism over nodes wait for the network.
FAST_LINK_MBIT: Final = 200_000


@check(
    "FIT-04",
    "weights and cache fit the device",
    level=Level.L1,
    why="a rank whose weights do not fit ends the start after minutes of loading",
    expected="the weights of a rank and the KV cache of one longest request",
    remedy=Remedy(bare_metal="{flags}"),
    requires=("FIT-02",),
    is_headline=True,
)
def memory_plan(context: CheckContext) -> Finding:
    """Takes weights and cache bytes of the fullest rank from the plan, the rest is an estimate.

    On a GPU nine tenths of its memory are used; on the CPU what is free now. Weights that do not
    fit fail; room for less than one request of the model's full length warns.
    """
    plan, memory = context.plan, context.plan.memory
    if memory is None or plan.model is None:
        return skipped(NO_MODEL)
    budget = _budget(context, memory, plan.model)
    if budget is None:
        return skipped("the memory of the device is not known")
    length = plan.model.max_position_embeddings
    text = f"{size_text(memory.max_weight_bytes)} weights/rank, "
    text += f"KV {size_text(budget.kv_bytes)} = {budget.num_tokens:,} tokens"
    if budget.num_tokens == 0:
        flags = f"-tp {plan.config.tp * 2}, or -pp {plan.config.pp * 2}, or a smaller model"
        if not context.is_cuda:
            flags = "free some memory, or name a smaller model"
        return failed(
            f"{text}: nothing is left of {size_text(budget.device_bytes)}",
            values={"flags": flags},
        )
    if budget.num_tokens < length:
        # Ranks of one machine share its memory: more of them have no more.
        other = f"-tp {plan.config.tp * 2}" if context.is_cuda else "free some memory"
        return warned(
            f"{text}, the model's length is {length:,}",
            values={"flags": f"--max-model-len {budget.num_tokens}, or {other}"},
        )
    return passed(f"{text} ({budget.num_tokens / length:.1f} × {length:,})")


def _budget(context: CheckContext, memory: MemoryPlan, spec: ModelSpec) -> KvBudget | None:
    per_token = max(rank.kv_bytes_per_token for rank in memory.ranks)
    if context.is_cuda:
        sizes = [gpu.memory_total_bytes for gpu in context.gpus if gpu.memory_total_bytes]
        if not sizes:
            return None
        activations = activation_bytes(
            spec,
            context.plan.config,
            dtype=memory.dtype,
            num_tokens=STEP_TOKENS,
            num_requests=STEP_REQUESTS,
        )
        return gpu_kv_budget(
            memory_bytes=min(sizes),
            utilization=GPU_PART,
            weight_bytes=memory.max_weight_bytes,
            activation_bytes=activations,
            kv_bytes_per_token=per_token,
            block_size=BLOCK_SIZE,
            graph_bytes=graph_bytes(
                spec,
                context.plan.config,
                dtype=memory.dtype,
                max_num_seqs=STEP_REQUESTS,
                max_num_batched_tokens=STEP_TOKENS,
            ),
        )
    free = context.host.usable_memory_bytes
    if free is None:
        return None
    return cpu_kv_budget(
        free_bytes=free,
        ranks_on_node=max(1, len(context.local_ranks)),
        weight_bytes=memory.max_weight_bytes,
        kv_bytes_per_token=per_token,
        block_size=BLOCK_SIZE,
    )


@check(
    "FIT-05",
    "the plan fits what is free now",
    level=Level.L1,
    why="memory that others hold now is missing when the weights are loaded",
    expected="free memory for weights and one cache block on each GPU of the plan",
    remedy=Remedy(
        bare_metal="--gpu-memory-utilization {part}, or free GPU {index}: GPU-03 names who holds it"
    ),
    requires=("FIT-04", "GPU-03"),
)
def fits_now(context: CheckContext) -> Finding:
    """Compares the part of each GPU that serve would take with what is free on it now.

    Less than that warns with the part that fits; too little for the weights is GPU-03.
    """
    memory = context.plan.memory
    if memory is None or not context.is_cuda:
        return skipped("planned for the CPU" if memory else NO_MODEL)
    for gpu in context.gpus:
        free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
        if free is None or total is None:
            continue
        if free < GPU_PART * total:
            part = int(free / total * 100) / 100
            return warned(
                f"GPU {gpu.index} has {size_text(free)} of {size_text(total)} free, "
                f"{GPU_PART:.0%} would be used",
                values={"part": part, "index": gpu.index},
            )
    return passed(f"{GPU_PART:.0%} of each GPU is free")


@check(
    "FIT-06",
    "the device computes in the model's type",
    level=Level.L1,
    why="a GPU without the type has no kernels for it",
    expected="bfloat16 from compute capability 8.0 on",
    remedy=Remedy(bare_metal="--dtype {dtype}"),
    requires=("FIT-02",),
)
def dtype_support(context: CheckContext) -> Finding:
    """Compares the type of the plan with the compute capability of each GPU."""
    memory = context.plan.memory
    if memory is None:
        return skipped(NO_MODEL)
    if not context.is_cuda:
        return passed(f"{memory.dtype} on the CPU")
    lack = gpus_without(memory.dtype, context.gpus)
    if lack:
        return failed(lack[0], values={"dtype": lack[1]}, is_typed=True)
    return passed(memory.dtype)


@check(
    "RDV-09",
    "tensor parallelism within a node",
    level=Level.L1,
    why="every layer of every step waits for the network twice",
    expected="each TP group on one node, or 200 Gbit/s between the nodes",
    remedy=Remedy(bare_metal="-tp {tp} -pp {pp}"),
)
def layout(context: CheckContext) -> Finding:
    """Compares the size of the TP groups with the ranks of a node, and the speed of the cards."""
    config = context.plan.config
    if config.nnodes == 1:
        return skipped("one node")
    local = config.local_world_size
    if local % config.tp == 0:
        return passed(f"groups of {config.tp} within {local} ranks a node")
    speeds = [nic.speed_mbit or 0 for nic in context.host.nics if nic.is_up and not nic.is_loopback]
    fastest = max(speeds, default=0)
    text = f"groups of {config.tp} over nodes with {local} ranks each"
    if fastest >= FAST_LINK_MBIT:
        return passed(f"{text}, at {fastest / 1000:g} Gbit/s")
    speed = f"{fastest / 1000:g} Gbit/s" if fastest else "a link of unknown speed"
    return warned(
        f"{text}, joined by {speed}", values={"tp": local, "pp": config.world_size // local}
    )


CHECKS = (memory_plan, fits_now, dtype_support, layout)
