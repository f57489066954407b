"""What loading reads, what it refuses, and that its errors name file, tensor and shapes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.model_steps import PagedSession, logits_in_chunks
from tests.support.tiny_model import tiny_checkpoint, write_checkpoint
from vcli.runtime.distributed.parallel_state import context_of_groups, single_rank_context
from vcli.runtime.distributed.virtual import virtual_groups
from vcli.runtime.layers.linear import can_pack
from vcli.runtime.models import decoder
from vcli.runtime.models.loader import (
    WeightLoadError,
    init_dummy_weights,
    load_weights,
)
from vcli.runtime.models.registry import build_model
from vcli.topology.errors import ConfigError, ExitStatus
from vcli.topology.model_spec import model_spec_from_config


def build(folder, *groups, layer_span=None, dtype=torch.float32):
    config = json.loads((folder / "config.json").read_text())
    spec = model_spec_from_config(config, source=str(folder))
    context = context_of_groups(rank=0, world_size=1, groups=groups)
    span = layer_span or (0, spec.num_layers)
    return build_model(spec, context, dtype=dtype, device="cpu", layer_span=span)


@pytest.fixture
def folder(tmp_path):
    """A copy of a checkpoint that may be damaged."""
    shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_progress_grows_to_one():
    folder = tiny_checkpoint("llama")
    seen = []
    report = load_weights(build(folder), folder, report=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert 10 < len(seen) <= 101
    assert report.num_files == 1
    assert report.unused == ()


def test_a_rank_reads_only_its_share():
    folder = tiny_checkpoint("llama")
    whole = load_weights(build(folder), folder).num_bytes
    model = build(folder, virtual_groups("TP", 4)[1])
    report = load_weights(model, folder)
    # Norms are on all ranks.
    assert whole / 4 < report.num_bytes < whole / 4 + 4096
    assert report.num_bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_sharded_checkpoint_equals_the_single_file(tmp_path):
    write_checkpoint(tmp_path, "qwen3", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded = build(tmp_path)
    assert load_weights(sharded, tmp_path).num_files > 2
    single = build(tiny_checkpoint("qwen3"))
    load_weights(single, tiny_checkpoint("qwen3"))
    for (name, ours), (_, other) in zip(
        sharded.named_parameters(), single.named_parameters(), strict=True
    ):
        assert torch.equal(ours, other), name


def test_missing_tensor_is_named(folder):
    name = "model.layers.2.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightLoadError, match=name) as caught:
        load_weights(build(folder), folder)
    assert str(folder) in caught.value.message
    assert caught.value.exit_status == ExitStatus.START_FAILED


def test_wrong_shape_names_file_tensor_and_both_shapes(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(32, 65)}))
    with pytest.raises(WeightLoadError) as caught:
        load_weights(build(folder), folder)
    for part in ("model.safetensors", name, "[32, 65]", "[32, 64]"):
        assert part in caught.value.message


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_truncated_file_is_named_whereever_it_is_cut(folder, kept):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(WeightLoadError, match=r"model\.safetensors"):
        load_weights(build(folder), folder)


def test_nothing_is_written_before_the_whole_checkpoint_was_checked(folder):
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    model = build(folder)
    for parameter in model.parameters():
        parameter.fill_(7.0)
    with pytest.raises(WeightLoadError):
        load_weights(model, folder)
    assert all((parameter == 7.0).all() for parameter in model.parameters())


def test_missing_shard_is_named(tmp_path):
    write_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(WeightLoadError, match=victim.name):
        load_weights(build(tmp_path), tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index_is_named(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightLoadError, match="index"):
        load_weights(build(folder), folder)


def test_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(WeightLoadError, match="neither"):
        load_weights(build(tiny_checkpoint("llama")), tmp_path)


def test_integer_weights_are_refused(folder):
    name = "model.norm.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(WeightLoadError, match=f"{name} is stored as I8"):
        load_weights(build(folder), folder)


def test_unused_tensors_are_reported_and_known_leftovers_are_not(folder):
    leftovers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.9.mlp.up_proj.weight": torch.ones(4),
        "score.weight": torch.ones(4),
    }
    rewrite(folder, lambda tensors: tensors.update(leftovers))
    report = load_weights(build(folder), folder)
    assert report.unused == ("model.layers.9.mlp.up_proj.weight", "score.weight")


def test_tensors_of_other_stages_are_not_called_unused(folder):
    stage = build(folder, virtual_groups("PP", 2)[0], layer_span=(0, 2))
    assert load_weights(stage, folder).unused == ()


def test_head_of_a_tied_model_in_the_file_is_ignored(tmp_path):
    shutil.copytree(tiny_checkpoint("llama", tie_word_embeddings=True), tmp_path / "model")
    folder = tmp_path / "model"
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 64)}))
    model = build(folder)
    assert load_weights(model, folder).unused == ()
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.lm_head.weight.abs().sum() > 0


def test_weights_are_converted_to_the_dtype_of_the_model():
    folder = tiny_checkpoint("llama")
    half = build(folder, dtype=torch.bfloat16)
    load_weights(half, folder)
    full = build(folder)
    load_weights(full, folder)
    assert torch.equal(half.embed_tokens.weight, full.embed_tokens.weight.bfloat16())


@pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU has no bfloat16 units"
)
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_multiply_as_the_plain_ones(monkeypatch, tied):
    folder = tiny_checkpoint("qwen2", tie_word_embeddings=tied)
    packed = build(folder, dtype=torch.bfloat16)
    load_weights(packed, folder)
    monkeypatch.setattr(decoder, "can_pack", lambda dtype, device: False)
    plain = build(folder, dtype=torch.bfloat16)
    load_weights(plain, folder)
    assert packed.layers[0].mlp.down_proj.weight.numel() == 0
    assert plain.layers[0].mlp.down_proj.weight.numel() == 64 * 96
    logits = []
    for model in (packed, plain):
        session = PagedSession()
        session.bind(model)
        logits.append(logits_in_chunks(model, session, 0, torch.arange(20), [7, 1, 12]))
    torch.testing.assert_close(*logits, rtol=2e-2, atol=2e-2 * logits[1].abs().max().item())


def test_dummy_weights_are_finite_and_follow_the_seed():
    models = [build(tiny_checkpoint("qwen3_moe")) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        init_dummy_weights(model, seed)
    first, same, other = (list(model.parameters()) for model in models)
    assert all(parameter.isfinite().all() for parameter in first)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])
    assert (models[0].norm.weight == 1).all()


def test_unknown_back_end_and_family_are_refused():
    folder = tiny_checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    spec = model_spec_from_config(config, source="x")
    options = {"dtype": torch.float32, "device": "cpu", "layer_span": (0, 4)}
    with pytest.raises(ConfigError, match="attention back end 'paged'"):
        build_model(spec, single_rank_context(), attention="paged", **options)
