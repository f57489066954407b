"""Fixtures of the tests of layers."""

import pytest
import torch


@pytest.fixture
def seeded():
    """The same random numbers in every run."""
    torch.manual_seed(0)
