"""Slices of weights filled through a real safetensors file, as a checkpoint fills them."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from vcli.runtime.checkpoint.safetensors_file import read_header
from vcli.runtime.layers.weights import WeightSlice
from vcli.runtime.models.weight_reader import StoredWeight, read_weights


def stored_weights(path: Path, slices: Iterable[WeightSlice]) -> list[StoredWeight]:
    """The slices with their places in the file."""
    entries = {entry.name: entry for entry in read_header(path)}
    return [StoredWeight(path, entries[weight.name], weight) for weight in slices]


def fill_slices(slices: Iterable[WeightSlice], checkpoint: Mapping[str, torch.Tensor]) -> None:
    """Write `checkpoint` to a file and read the slices from it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in checkpoint.items()}, path)
        read_weights(stored_weights(path, slices), torch.device("cpu"), on_elements=lambda _: None)
