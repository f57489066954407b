"""Pieces of files into parameters: what is read, by how many threads, and what ends it."""

import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.support.weight_files import fill_slices, stored_weights
from vcli.runtime.layers.weights import WeightSlice, whole_tensor
from vcli.runtime.models import weight_reader
from vcli.runtime.models.weight_reader import PieceError, read_weights

CPU = torch.device("cpu")


def part(name, shape, source, target):
    return WeightSlice(name=name, shape=shape, source=source, target=target)


def test_a_slice_fills_its_target_and_zeros_the_rest():
    stored = torch.arange(12.0).view(3, 4)
    target = torch.full((4, 3), float("nan"))
    weight = part("w", (3, 4), (slice(1, 3), slice(2, 4)), target)
    fill_slices([weight], {"w": stored})
    assert weight.num_elements == 4
    assert target.tolist() == [[6, 7, 0], [10, 11, 0], [0, 0, 0], [0, 0, 0]]


def test_a_slice_that_lies_in_the_padding_reads_nothing(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(3, 4)}, path)
    target = torch.full((2, 4), float("nan"))
    weight = part("w", (3, 4), (slice(3, 3), slice(0, 4)), target)
    seen = []
    read_weights(stored_weights(path, [weight]), CPU, on_elements=seen.append)
    assert (target == 0).all()
    assert seen == []


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    data=st.data(),
    stored_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    piece_bytes=st.sampled_from([1, 64, 1000, 1 << 20]),
    min_row_bytes=st.sampled_from([1, 16, 1 << 20]),
)
def test_any_slice_through_any_pieces_is_what_indexing_gives(
    rows, columns, data, stored_dtype, dtype, piece_bytes, min_row_bytes
):
    first, start = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns - 1))
    last, stop = data.draw(st.integers(first, rows)), data.draw(st.integers(start + 1, columns))
    stored = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(
        stored_dtype
    )
    target = torch.full((last - first + 1, stop - start), float("nan"), dtype=dtype)
    weight = part("w", (rows, columns), (slice(first, last), slice(start, stop)), target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_reader, "PIECE_BYTES", piece_bytes)
        patch.setattr(weight_reader, "_MIN_ROW_BYTES", min_row_bytes)
        fill_slices([weight], {"w": stored})
    assert torch.equal(target[:-1], stored[first:last, start:stop].to(dtype))
    assert (target[-1] == 0).all()


def test_columns_are_read_without_the_rest_of_their_rows(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    stored = torch.randn(50, 4096)
    save_file({"w": stored}, path)
    target = torch.empty(50, 1024)
    weight = part("w", (50, 4096), (slice(0, 50), slice(1024, 2048)), target)
    read = []
    preadv = os.preadv

    def counting(descriptor, buffers, offset):
        got = preadv(descriptor, buffers, offset)
        read.append(got)
        return got

    monkeypatch.setattr(weight_reader.os, "preadv", counting)
    read_weights(stored_weights(path, [weight]), CPU, on_elements=lambda _: None)
    assert torch.equal(target, stored[:, 1024:2048])
    assert sum(read) == target.nbytes


def test_bytes_that_come_in_small_portions_are_put_together(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    stored = torch.randn(64, 16)
    save_file({"w": stored}, path)
    preadv = os.preadv
    monkeypatch.setattr(
        weight_reader.os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7]], offset)
    )
    target = torch.empty(64, 16)
    weights = stored_weights(path, [whole_tensor("w", target)])
    read_weights(weights, CPU, on_elements=lambda _: None)
    assert torch.equal(target, stored)


def test_progress_is_told_in_the_calling_thread_and_adds_up(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 512)
    path = tmp_path / "m.safetensors"
    tensors = {f"w{i}": torch.randn(30, 10) for i in range(4)}
    save_file(tensors, path)
    targets = [whole_tensor(name, torch.empty(30, 10)) for name in tensors]
    seen, threads = [], set()

    def note(count):
        seen.append(count)
        threads.add(threading.get_ident())

    read_weights(stored_weights(path, targets), CPU, on_elements=note, num_threads=3)
    assert sum(seen) == 4 * 300
    assert len(seen) > 4
    assert threads == {threading.get_ident()}


def test_a_file_cut_short_after_its_header_was_read_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "m.safetensors"
    tensors = {"a": torch.randn(100, 100), "b": torch.randn(100, 100)}
    save_file(tensors, path)
    weights = stored_weights(path, [whole_tensor(n, torch.empty(100, 100)) for n in tensors])
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(PieceError, match=r"m\.safetensors: b cannot be read: the file ends at"):
        read_weights(weights, CPU, on_elements=lambda _: None)


def test_a_failure_leaves_no_thread_and_no_open_file(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.randn(100, 100)}, path)
    weights = stored_weights(path, [whole_tensor("a", torch.empty(100, 100))])
    os.truncate(path, 200)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(PieceError):
        read_weights(weights, CPU, on_elements=lambda _: None)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not [each for each in threading.enumerate() if each.name.startswith("weights")]
