"""Tensor parallel sizes that do not divide the model: the plan pads, the logits stay the same."""

import json
import math
from functools import cache

import pytest
import torch

from tests.support.model_steps import PagedSession, logits_in_chunks, run_ranks
from tests.support.tiny_model import FAMILIES, tiny_checkpoint
from vcli.runtime.distributed.parallel_state import context_of_groups, single_rank_context
from vcli.runtime.distributed.virtual import virtual_groups
from vcli.runtime.layers.norm import RMSNorm
from vcli.runtime.models.loader import load_weights
from vcli.runtime.models.registry import build_model
from vcli.topology import ConfigError, ParallelConfig, model_spec_from_config, plan_topology

NUM_TOKENS = 19
#: Primes: no TP size divides them. The reference wants the experts' in whole 16 bytes.
VOCAB_SIZE = 509
SIZES = {"vocab_size": VOCAB_SIZE, "intermediate_size": 101}
TOKEN_IDS = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def checkpoint(family, heads, *, tied=False):
    num_heads, num_kv_heads = heads
    experts = {"moe_intermediate_size": 44} if family == "qwen3_moe" else {}
    return tiny_checkpoint(
        family,
        tie_word_embeddings=tied,
        hidden_size=8 * num_heads,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=2,
        **SIZES,
        **experts,
    )


@cache
def spec_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return model_spec_from_config(config, source=str(folder))


def planned_spec(folder, tp):
    plan = plan_topology(ParallelConfig(tensor_parallel_size=tp), model=spec_of(folder))
    assert plan.model is not None
    return plan.model


@cache
def reference_logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(TOKEN_IDS[None]).logits[0]


def build(spec, context):
    return build_model(
        spec, context, dtype=torch.float32, device="cpu", layer_span=(0, spec.num_layers)
    )


def build_ranks(folder, tp):
    """The shards of all ranks, full of NaN."""
    spec = planned_spec(folder, tp)
    models = []
    for group in virtual_groups("TP", tp):
        context = context_of_groups(rank=group.rank_in_group, world_size=tp, groups=(group,))
        model = build(spec, context)
        for parameter in model.parameters():
            parameter.fill_(math.nan)
        models.append(model)
    return models


def logits_of_ranks(folder, tp):
    def rank_function(model):
        def run():
            load_weights(model, folder)
            session = PagedSession()
            session.bind(model)
            return logits_in_chunks(model, session, 0, TOKEN_IDS, [10, 1, 1, 7])

        return run

    return run_ranks([rank_function(model) for model in build_ranks(folder, tp)])


@pytest.mark.parametrize(
    ("heads", "tp"),
    [((8, 4), 3), ((8, 4), 5), ((8, 4), 6), ((8, 4), 7), ((9, 3), 2), ((9, 3), 4), ((9, 3), 6)],
    ids=lambda value: str(value).replace(", ", "/"),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_on_every_rank(family, heads, tp):
    folder = checkpoint(family, heads)
    reference = reference_logits(folder)
    for logits in logits_of_ranks(folder, tp):
        # What is no token has no logit, so it can't be sampled.
        assert logits.shape == (NUM_TOKENS, VOCAB_SIZE)
        error = (logits - reference).abs().max() / reference.abs().max()
        assert error < 1e-4, f"relative error {error:.2e}"


def test_a_tied_head_is_padded_with_its_embedding():
    folder = checkpoint("llama", (9, 3), tied=True)
    reference = reference_logits(folder)
    for logits in logits_of_ranks(folder, 2):
        assert (logits - reference).abs().max() < 1e-4 * reference.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_read_the_checkpoint_once_and_the_norms_each(family):
    folder, tp = checkpoint(family, (9, 3)), 4
    context = single_rank_context()
    whole = load_weights(build(spec_of(folder), context), folder).num_bytes
    models = build_ranks(folder, tp)
    reports = [load_weights(model, folder) for model in models]
    replicated = sum(
        module.weight.nbytes for module in models[0].modules() if isinstance(module, RMSNorm)
    )
    if family == "qwen3_moe":
        # The router of each of the two layers, of which the second has no experts.
        replicated += models[0].layers[0].mlp.gate.weight.nbytes
    assert sum(report.num_bytes for report in reports) == whole + (tp - 1) * replicated
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), name


def test_a_rank_of_zero_heads_reads_none_and_holds_zeros():
    last = build_ranks(checkpoint("qwen2", (9, 3)), 4)[-1]
    load_weights(last, checkpoint("qwen2", (9, 3)))
    attention = last.layers[0].self_attn
    for weight in (attention.qkv_proj.weight, attention.qkv_proj.bias, attention.o_proj.weight):
        assert weight.numel()
        assert (weight == 0).all()


def test_sizes_that_no_plan_padded_are_refused():
    folder = checkpoint("llama", (9, 3))
    group = virtual_groups("TP", 2)[0]
    context = context_of_groups(rank=0, world_size=2, groups=(group,))
    with pytest.raises(ConfigError, match="cannot be divided"):
        build(spec_of(folder), context)


def test_padding_beyond_twice_the_kv_cache_is_refused_with_the_nearest_sizes():
    with pytest.raises(ConfigError, match=r"4 KV heads on .* 9 would be padded to 9") as caught:
        planned_spec(checkpoint("llama", (8, 4)), 9)
    assert caught.value.hint == "--tensor-parallel-size: 6, 7, 8, 12"
