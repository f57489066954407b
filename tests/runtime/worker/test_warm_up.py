"""Dummy steps: their sizes, and that they write to the scratch block alone."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.fake_worker import fake_config
from vcli.runtime.config import SchedulerConfig
from vcli.runtime.worker.metadata import build_dummy_inputs
from vcli.runtime.worker.warm_up import largest_query_lens, warm_up_batches


@pytest.mark.parametrize(
    ("tokens", "seqs", "model_len", "expected"),
    [
        (8, 4, 100, [2, 2, 2, 2]),
        (10, 4, 100, [3, 3, 2, 2]),
        (3, 8, 100, [1, 1, 1]),
        (100, 2, 5, [5, 5]),
        (7, 1, 100, [7]),
    ],
)
def test_largest_step_is_filled_evenly_within_all_limits(tokens, seqs, model_len, expected):
    assert largest_query_lens(tokens, seqs, model_len) == expected


def test_dummy_requests_write_and_read_only_the_scratch_block():
    inputs = build_dummy_inputs([9, 1, 4], scratch_block=6, block_size=4)
    assert {slot // 4 for slot in inputs.slot_mapping_T.tolist()} == {6}
    assert set(inputs.block_tables_RB.flatten().tolist()) == {6}
    assert inputs.positions_T.tolist() == [*range(9), 0, *range(4)]
    assert inputs.query_start_loc.tolist() == [0, 9, 10, 14]
    assert inputs.seq_lens_R.tolist() == [9, 1, 4]
    assert inputs.block_tables_RB.shape == (3, 3)


@pytest.mark.parametrize(
    ("device", "seqs", "expected"),
    [
        ("cuda", 1, [1]),
        ("cuda", 40, [40, 32, 16, 2]),
        ("cuda", 256, [256, 64, 32, 16, 2]),
        ("cpu", 40, []),
    ],
)
def test_batches_of_decodes_run_on_devices_alone_the_largest_first(
    device, seqs, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    run = []
    runner = SimpleNamespace(dummy_step=run.append)
    config = fake_config(scheduler=SchedulerConfig(max_num_seqs=seqs))
    warm_up_batches(runner, config, torch.device(device))
    assert run == [[1] * count for count in expected]
