"""Dummy steps: their sizes, and that they write to the scratch block alone."""

import pytest

from vcli.runtime.worker.metadata import build_dummy_inputs
from vcli.runtime.worker.warm_up import largest_query_lens


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
