"""What is read ahead: this stage's tensors, a share for each rank, nothing of what is broken."""

import torch
from safetensors.torch import save_file

from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import engine_config
from vcli.runtime.worker import prefetch
from vcli.runtime.worker.prefetch import ranges_ahead, start_prefetch


def test_shares_of_all_ranks_cover_the_tensors_once(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(777)}, path)
    data_begin = path.stat().st_size - 1777 * 4
    covered = [
        byte
        for rank in range(3)
        for offset, length in ranges_ahead(path, None, (rank, 3))
        for byte in range(offset, offset + length)
    ]
    assert covered == list(range(data_begin, path.stat().st_size))


def test_layers_of_other_stages_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch, "_GAP_BYTES", 0)
    path = tmp_path / "m.safetensors"
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]
    save_file({name: torch.ones(100) for name in names}, path)
    own = sum(length for _, length in ranges_ahead(path, (1, 3), (0, 1)))
    assert own == 2 * 400


def test_the_kernel_is_asked_for_the_whole_file_in_small_steps(monkeypatch):
    folder = tiny_checkpoint()
    asked = []
    monkeypatch.setattr(prefetch, "_STEP_BYTES", 10_000)
    monkeypatch.setattr(
        prefetch.os, "posix_fadvise", lambda fd, offset, length, advice: asked.append(length)
    )
    config = engine_config(folder)
    thread = start_prefetch(config, config.plan.rank_plan(0))
    assert thread is not None
    thread.join(10)
    assert max(asked) == 10_000
    size = (folder / "model.safetensors").stat().st_size
    assert 0.9 * size < sum(asked) < size


def test_what_does_not_fit_free_memory_is_not_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(prefetch, "free_host_bytes", lambda: 1000)
    monkeypatch.setattr(prefetch.os, "posix_fadvise", lambda *_: asked.append(1))
    config = engine_config(tiny_checkpoint())
    thread = start_prefetch(config, config.plan.rank_plan(0))
    thread.join(10)
    assert asked == []


def test_broken_files_are_left_to_the_loader(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    prefetch._read_ahead(tmp_path, None, (0, 1))
    prefetch._read_ahead(tmp_path / "missing", None, (0, 1))


def test_random_weights_are_not_read_ahead():
    config = engine_config(tiny_checkpoint(), load_format="dummy")
    assert start_prefetch(config, config.plan.rank_plan(0)) is None
