"""What the plan counts is what the layers allocate: parameters and KV rows, to the byte."""

import pytest
import torch

from tests.support.topo_runs import LLAMA_8B, QWEN3_MOE, SMOLLM2
from vcli.runtime.distributed.parallel_state import ParallelContext, single_rank_context
from vcli.runtime.distributed.virtual import virtual_groups
from vcli.runtime.layers.attention import Attention
from vcli.runtime.models.registry import build_model
from vcli.topology import ParallelConfig, RankPlan, model_spec_from_config, plan_topology


def context_of(rank: RankPlan, tp: int, pp: int) -> ParallelContext:
    alone = single_rank_context()
    return ParallelContext(
        rank=rank.rank,
        world_size=tp * pp,
        tp=virtual_groups("TP", tp)[rank.tp_rank],
        pp=virtual_groups("PP", pp)[rank.pp_rank],
        pcp=alone.pcp,
        dcp=alone.dcp,
        dp=alone.dp,
        ep=alone.ep,
    )


@pytest.mark.parametrize(
    ("config", "tp", "pp"),
    [
        (SMOLLM2, 1, 1),
        (SMOLLM2, 3, 1),
        (SMOLLM2, 3, 2),
        (SMOLLM2, 1, 4),
        (LLAMA_8B, 1, 1),
        (LLAMA_8B, 8, 1),
        (LLAMA_8B, 4, 2),
        (LLAMA_8B, 16, 1),
        (QWEN3_MOE, 4, 2),
        # Padded: heads, and at 5, 7 and 12 ranks MLPs and vocabulary too.
        (SMOLLM2, 2, 1),
        (SMOLLM2, 4, 2),
        (SMOLLM2, 5, 1),
        (SMOLLM2, 6, 1),
        (LLAMA_8B, 3, 2),
        (LLAMA_8B, 12, 1),
        (QWEN3_MOE, 5, 2),
        (QWEN3_MOE, 7, 1),
        (QWEN3_MOE, 12, 1),
    ],
)
def test_plan_counts_the_bytes_that_the_layers_hold(
    config: dict[str, object], tp: int, pp: int
) -> None:
    spec = model_spec_from_config(config, source="test")
    parallel = ParallelConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, is_moe=spec.is_moe
    )
    plan = plan_topology(parallel, model=spec, dtype="bfloat16")
    assert plan.memory is not None
    assert plan.model is not None
    for number in (0, tp * pp - 1):
        rank = plan.rank_plan(number)
        assert rank.layer_span is not None
        model = build_model(
            plan.model,
            context_of(rank, tp, pp),
            dtype=torch.bfloat16,
            device="meta",
            layer_span=rank.layer_span,
        )
        held = {id(weight): weight for weight in model.parameters()}
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in held.values())
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        # keys and values of one token in bfloat16
        kv_bytes = sum(2 * 2 * layer.num_kv_heads * layer.head_size for layer in layers)

        assert plan.memory.ranks[number].weight_bytes == weight_bytes
        assert plan.memory.ranks[number].kv_bytes_per_token == kv_bytes
