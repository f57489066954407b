"""Our models against transformers' in float32, through a paged cache and cut over ranks."""

import json
from functools import cache

import pytest
import torch

from tests.support.model_steps import PagedSession, logits_in_chunks, run_ranks
from tests.support.tiny_model import (
    FAMILIES,
    NUM_LAYERS,
    VOCAB_SIZE,
    tiny_checkpoint,
)
from vcli.runtime.distributed.collectives import recv_tensors, send_tensors
from vcli.runtime.distributed.parallel_state import context_of_groups, single_rank_context
from vcli.runtime.distributed.virtual import virtual_groups
from vcli.runtime.layers.attention import AttentionStep
from vcli.runtime.models.loader import load_weights
from vcli.runtime.models.registry import build_model
from vcli.topology.model_spec import model_spec_from_config

NUM_TOKENS = 23
TOKEN_IDS = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
OTHER_IDS = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(4))

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def spec_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return model_spec_from_config(config, source=str(folder))


def load_model(folder, context=None, layer_span=None, dtype=torch.float32):
    spec = spec_of(folder)
    model = build_model(
        spec,
        context or single_rank_context(),
        dtype=dtype,
        device="cpu",
        layer_span=layer_span or (0, spec.num_layers),
    )
    load_weights(model, folder)
    return model


@cache
def reference_logits(folder, which="first"):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = TOKEN_IDS if which == "first" else OTHER_IDS
    with torch.inference_mode():
        return model(ids[None]).logits[0]


def assert_close(ours, reference):
    error = (ours - reference).abs().max() / reference.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "chunk_sizes",
    [[NUM_TOKENS], [9, 1, 6, 7], [3] + [1] * (NUM_TOKENS - 3)],
    ids=["one-prefill", "chunks", "token-by-token"],
)
def test_logits_equal_those_of_transformers(family, tied, chunk_sizes):
    folder = tiny_checkpoint(family, tie_word_embeddings=tied)
    model, session = load_model(folder), PagedSession()
    session.bind(model)
    logits = logits_in_chunks(model, session, 0, TOKEN_IDS, chunk_sizes)
    assert logits.dtype == torch.float32
    assert_close(logits, reference_logits(folder))


def test_prefills_and_decodes_in_one_batch_do_not_see_each_other():
    folder = tiny_checkpoint("qwen3")
    model, session = load_model(folder), PagedSession()
    session.bind(model)
    ids = {0: TOKEN_IDS, 1: OTHER_IDS, 2: TOKEN_IDS}
    expected = {
        0: reference_logits(folder),
        1: reference_logits(folder, "second"),
        2: reference_logits(folder),
    }
    steps = [{0: 5}, {1: 11, 0: 1}, {0: 1, 2: 4, 1: 1}, {2: 9, 0: 7, 1: 1}, {0: 1, 1: 1, 2: 1}]
    for chunks in steps:
        starts = {number: session.computed.get(number, 0) for number in chunks}
        positions, metadata = session.step(chunks)
        batch = torch.cat([ids[n][starts[n] : starts[n] + count] for n, count in chunks.items()])
        attention = AttentionStep.planned(model.attention_backend, metadata)
        logits = model.compute_logits(model(batch, positions, attention))
        wanted = [expected[n][starts[n] : starts[n] + count] for n, count in chunks.items()]
        assert_close(logits, torch.cat(wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_nobody_samples_are_left_out_of_the_last_layer_but_stay_in_its_cache(family):
    folder = tiny_checkpoint(family)
    model, session = load_model(folder), PagedSession()
    session.bind(model)
    widths = []
    model.layers[-1].mlp.register_forward_pre_hook(lambda _, args: widths.append(len(args[0])))
    hidden = []
    for start, rows in ((0, [8]), (9, [0, 5, 6])):
        count = rows[-1] + 1
        positions, metadata = session.step({0: count})
        attention = AttentionStep.planned(model.attention_backend, metadata)
        batch = TOKEN_IDS[start : start + count]
        hidden.append(model(batch, positions, attention, rows_N=torch.tensor(rows)))
    assert widths == [1, 3]
    expected = reference_logits(folder)[[8, 9, 14, 15]]
    assert_close(model.compute_logits(torch.cat(hidden)), expected)


def tensor_parallel_logits(folder, tp_size, chunk_sizes):
    def rank_function(group):
        def run():
            context = context_of_groups(
                rank=group.rank_in_group, world_size=group.size, groups=(group,)
            )
            model, session = load_model(folder, context), PagedSession()
            session.bind(model)
            return logits_in_chunks(model, session, 0, TOKEN_IDS, chunk_sizes)

        return run

    return run_ranks([rank_function(group) for group in virtual_groups("TP", tp_size)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp_size", [2, 4, 8], ids=["tp2", "tp4", "tp8-replicated-kv"])
def test_tensor_parallel_logits_equal_the_dense_ones_on_every_rank(family, tp_size):
    folder = tiny_checkpoint(family)
    for logits in tensor_parallel_logits(folder, tp_size, [10, 1, 1, 11]):
        assert_close(logits, reference_logits(folder))


def test_tensor_parallel_works_with_a_tied_head():
    folder = tiny_checkpoint("llama", tie_word_embeddings=True)
    for logits in tensor_parallel_logits(folder, 2, [NUM_TOKENS]):
        assert_close(logits, reference_logits(folder))


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_pipeline_stages_give_the_logits_of_one(family, tied):
    folder = tiny_checkpoint(family, tie_word_embeddings=tied)
    first_pp, last_pp = virtual_groups("PP", 2)
    first = load_model(folder, _pp_context(first_pp), layer_span=(0, 1))
    last = load_model(folder, _pp_context(last_pp), layer_span=(1, NUM_LAYERS))
    sessions = PagedSession(), PagedSession()
    for session, stage in zip(sessions, (first, last), strict=True):
        session.bind(stage)
    parts, start = [], 0
    for count in (12, 1, 10):
        positions, metadata = sessions[0].step({0: count})
        attention = AttentionStep.planned(first.attention_backend, metadata)
        sessions[1].step({0: count})
        intermediate = first(TOKEN_IDS[start : start + count], positions, attention)
        assert set(intermediate) == {"hidden", "residual"}
        send_tensors(intermediate, first_pp)
        received = recv_tensors(last.empty_intermediate(count), last_pp)
        hidden = last(TOKEN_IDS[start : start + count], positions, attention, received)
        parts.append(last.compute_logits(hidden))
        start += count
    assert_close(torch.cat(parts), reference_logits(folder))


def _pp_context(group):
    return context_of_groups(rank=group.rank_in_group, world_size=2, groups=(group,))


def test_a_stage_builds_only_its_own_layers():
    folder = tiny_checkpoint("llama", tie_word_embeddings=True)
    _, last_pp = virtual_groups("PP", 2)
    last = load_model(folder, _pp_context(last_pp), layer_span=(3, NUM_LAYERS))
    assert last.embed_tokens is None
    assert [layer.layer_index for layer in last.layers] == [3]
    assert torch.equal(last.lm_head.weight, load_model(folder).embed_tokens.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision_stays_near_float32(dtype):
    folder = tiny_checkpoint("llama")
    model, session = load_model(folder, dtype=dtype), PagedSession()
    session.bind(model)
    logits = logits_in_chunks(model, session, 0, TOKEN_IDS, [8, 1, 1, 13])
    reference = reference_logits(folder)
    error = (logits - reference).norm() / reference.norm()
    assert error < 0.1
