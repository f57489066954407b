"""Bytes per rank against figures computed by hand, and the rules of cutting a model."""

from dataclasses import replace
from typing import Any

import pytest

from vcli.topology import (
    ConfigError,
    ModelSpec,
    ParallelConfig,
    check_model_fits,
    dtype_bytes,
    kv_bytes_per_token,
    layer_ranges,
    local_heads,
    model_spec_from_config,
    num_parameters,
    plan_topology,
    rank_parameters,
    valid_tp_sizes,
    weight_bytes,
)

SMOLLM2 = model_spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    source="SmolLM2-135M",
)
LLAMA_8B = model_spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
    source="Llama-3-8B",
)
QWEN2 = model_spec_from_config(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    source="Qwen2.5-0.5B",
)
QWEN3 = model_spec_from_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    source="Qwen3-0.6B",
)
QWEN3_MOE = model_spec_from_config(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    },
    source="Qwen3-30B-A3B",
)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SMOLLM2, 134_515_008),
        (LLAMA_8B, 8_030_261_248),
        (QWEN2, 494_032_768),
        (QWEN3, 596_049_920),
        (QWEN3_MOE, 30_532_122_624),
    ],
    ids=["smollm2", "llama-8b", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-30b-a3b"],
)
def test_parameters_are_those_that_the_model_cards_give(spec: ModelSpec, expected: int) -> None:
    assert num_parameters(spec) == expected


def test_smollm2_on_three_tp_ranks() -> None:
    parallel = ParallelConfig(tensor_parallel_size=3)
    # q 576*192, k and v 576*64 each, o 192*576, gate, up and down 3*576*512, two norms
    layer = 576 * 192 + 2 * 576 * 64 + 192 * 576 + 3 * 576 * 512 + 2 * 576
    expected = 30 * layer + 576 + 16384 * 576

    assert rank_parameters(SMOLLM2, parallel, pp_rank=0, ep_rank=0) == expected
    size = weight_bytes(SMOLLM2, parallel, pp_rank=0, ep_rank=0, dtype="bfloat16")
    assert size == 2 * expected


def test_smollm2_kv_bytes_per_token() -> None:
    whole = ParallelConfig()
    cut = ParallelConfig(tensor_parallel_size=3, pipeline_parallel_size=2)

    assert kv_bytes_per_token(SMOLLM2, whole, pp_rank=0, dtype="bfloat16") == 2 * 3 * 64 * 30 * 2
    assert kv_bytes_per_token(SMOLLM2, cut, pp_rank=1, dtype="float32") == 2 * 1 * 64 * 15 * 4


def test_last_stage_holds_its_own_copy_of_tied_embeddings() -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2)
    stages = [rank_parameters(SMOLLM2, parallel, pp_rank=stage, ep_rank=0) for stage in (0, 1)]

    assert sum(stages) == 134_515_008 + 49152 * 576
    assert stages[1] - stages[0] == 576


def test_ranks_add_up_to_the_model_where_nothing_is_replicated() -> None:
    spec, parallel = LLAMA_8B, ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=4)
    held = sum(8 * rank_parameters(spec, parallel, pp_rank=stage, ep_rank=0) for stage in range(4))
    replicated_norms = 7 * (2 * 32 + 1) * 4096

    assert held == num_parameters(spec) + replicated_norms


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    assert local_heads(LLAMA_8B, 16) == (2, 1)
    token = 2 * 1 * 128 * 32 * 2
    for tp in (8, 16, 32):
        parallel = ParallelConfig(tensor_parallel_size=tp)
        assert kv_bytes_per_token(LLAMA_8B, parallel, pp_rank=0, dtype="bfloat16") == token


def test_decode_context_ranks_share_the_tokens() -> None:
    parallel = ParallelConfig(tensor_parallel_size=16, decode_context_parallel_size=2)

    check_model_fits(LLAMA_8B, parallel)
    assert kv_bytes_per_token(LLAMA_8B, parallel, pp_rank=0, dtype="bfloat16") == 2 * 128 * 32


def test_experts_are_sharded_by_tp_or_dealt_whole_by_ep() -> None:
    by_tp = ParallelConfig(tensor_parallel_size=4, is_moe=True)
    by_ep = replace(by_tp, enable_expert_parallel=True)
    wide = replace(by_ep, data_parallel_size=2)
    expert = 3 * 2048 * 768

    counts = [
        rank_parameters(QWEN3_MOE, parallel, pp_rank=0, ep_rank=0)
        for parallel in (by_tp, by_ep, wide)
    ]

    assert counts[0] == counts[1]
    assert counts[1] - counts[2] == 48 * (32 - 16) * expert


def test_redundant_experts_count() -> None:
    plain = ParallelConfig(tensor_parallel_size=4, is_moe=True, enable_expert_parallel=True)
    more = replace(plain, enable_eplb=True, num_redundant_experts=4)
    counts = [
        rank_parameters(QWEN3_MOE, parallel, pp_rank=0, ep_rank=3) for parallel in (plain, more)
    ]

    assert counts[1] - counts[0] == 48 * 3 * 2048 * 768


def test_plan_has_the_bytes_of_each_rank() -> None:
    plan = plan_topology(
        ParallelConfig(tensor_parallel_size=3, pipeline_parallel_size=2),
        model=SMOLLM2,
        dtype="float32",
    )

    assert plan.memory is not None
    assert plan.memory.num_parameters == 134_515_008
    assert [rank.rank for rank in plan.memory.ranks] == list(range(6))
    assert plan.memory.ranks[5].weight_bytes == plan.memory.max_weight_bytes
    assert {rank.kv_bytes_per_token for rank in plan.memory.ranks} == {2 * 64 * 15 * 4}
    assert plan.layer_spans == ((0, 15), (15, 30))
    assert plan.rank_plan(3).layer_span == (15, 30)


def test_valid_tp_sizes() -> None:
    assert valid_tp_sizes(SMOLLM2) == (1, 3)
    assert valid_tp_sizes(LLAMA_8B) == (1, 2, 4, 8, 16, 32)
    assert valid_tp_sizes(QWEN2) == (1, 2)


UNFIT: list[tuple[ModelSpec, dict[str, Any], str, str]] = [
    (SMOLLM2, {"tensor_parallel_size": 7}, "would be padded to 7, more than 2", ": 4, 5, 6, 9"),
    (QWEN2, {"tensor_parallel_size": 7}, "2 KV heads on tensor parallel size 7", ": 4, 6, 8, 10"),
    (LLAMA_8B, {"tensor_parallel_size": 17}, "would be padded to 17", ": 13, 14, 15, 16"),
    (SMOLLM2, {"pipeline_parallel_size": 31}, "more than the model's 30 layers", "1..30"),
    (
        SMOLLM2,
        {"pipeline_parallel_size": 2, "pp_layer_partition": (20, 20)},
        "adds up to 40 layers, the model has 30",
        "15,15",
    ),
    (SMOLLM2, {"enable_expert_parallel": True}, "needs a model with experts", "leave out"),
    (
        SMOLLM2,
        {"data_parallel_size": 2, "data_parallel_rank": 0},
        "replicas of a dense model",
        "an instance of its own",
    ),
    (
        QWEN3_MOE,
        {"data_parallel_size": 129, "enable_expert_parallel": True},
        "129 ranks",
        "lower",
    ),
    (
        QWEN3_MOE,
        {
            "tensor_parallel_size": 4,
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "num_redundant_experts": 2,
        },
        "128 + 2 redundant do not divide",
        "--num-redundant-experts 4",
    ),
    (
        LLAMA_8B,
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 2},
        "as many replicas of each KV head",
        "--decode-context-parallel-size: 1",
    ),
]


@pytest.mark.parametrize(("spec", "values", "message", "hint"), UNFIT)
def test_model_that_cannot_be_cut_is_refused_with_the_nearest_choice(
    spec: ModelSpec, values: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model_fits(spec, ParallelConfig(is_moe=spec.is_moe, **values))

    assert message in caught.value.message
    assert hint in caught.value.hint


def test_whatever_fits_can_be_counted() -> None:
    for spec in (SMOLLM2, LLAMA_8B, QWEN2, QWEN3, QWEN3_MOE):
        for tp in valid_tp_sizes(spec):
            plan = plan_topology(ParallelConfig(tensor_parallel_size=tp), model=spec)
            assert plan.memory is not None
            assert plan.memory.max_weight_bytes * tp >= num_parameters(spec) * 2


def test_partition_is_checked() -> None:
    assert [len(layers) for layers in layer_ranges(30, 3, (20, 9, 1))] == [20, 9, 1]
    with pytest.raises(ConfigError):
        layer_ranges(30, 3, (15, 15))


def test_unknown_dtype_lists_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        dtype_bytes("int4")

    assert "float32, bfloat16, float16" in caught.value.hint
