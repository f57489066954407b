"""Draws: whose generator they come from, and that none of them is 1."""

import numpy as np
import pytest
import torch

from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.sampling_columns import SamplingColumns


def test_largest_number_that_a_generator_can_draw_stays_below_one():
    columns = SamplingColumns(1)
    generator = torch.Generator().manual_seed(0)
    largest = torch.tensor(1.0 - 2.0**-53, dtype=torch.float64)
    scaled = largest * (1.0 - 2.0**-52)
    for total in torch.rand(1000, dtype=torch.float64, generator=generator) * 2:
        assert scaled * total < total
    assert 0.0 <= columns.draw(np.arange(1), generator).item() < 1.0


def draws_of(columns, rows, count):
    shared = torch.Generator().manual_seed(99)
    return [columns.draw(np.array(rows), shared).tolist() for _ in range(count)]


def test_seeded_rows_draw_the_same_whoever_is_beside_them():
    seeded = SamplingParams(seed=1234)
    alone = SamplingColumns(1)
    alone.set_row(0, seeded, (), num_generated=0)
    expected = [draws[0] for draws in draws_of(alone, [0], 20)]
    crowd = SamplingColumns(4)
    for row, sampling in enumerate([SamplingParams(), seeded, SamplingParams(seed=5), seeded]):
        crowd.set_row(row, sampling, (), num_generated=0)
    drawn = draws_of(crowd, [3, 0, 1, 2], 20)
    assert [draws[0] for draws in drawn] == expected
    assert [draws[2] for draws in drawn] == expected
    assert [draws[3] for draws in drawn] != expected
    assert len(set(expected)) == 20


def test_resumed_request_goes_on_with_the_draws_it_would_have_had():
    seeded = SamplingParams(seed=2**64 - 1)
    columns = SamplingColumns(1)
    columns.set_row(0, seeded, (), num_generated=0)
    expected = draws_of(columns, [0], 40)
    for num_generated in (1, 7, 15, 16, 33):
        columns.set_row(0, seeded, (), num_generated=num_generated)
        rest = draws_of(columns, [0], 40 - num_generated)
        assert rest == expected[num_generated:], num_generated


def test_row_of_a_seeded_request_forgets_the_seed_with_it():
    columns = SamplingColumns(1)
    columns.set_row(0, SamplingParams(seed=1), (), num_generated=0)
    columns.clear_row(0)
    columns.set_row(0, SamplingParams(), (), num_generated=0)
    shared = torch.Generator().manual_seed(3)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert columns.draw(np.array([0]), shared).item() == pytest.approx(expected.item())
