"""What the FlashInfer back end computes on the host; its kernels are tested in tests/gpu."""

import subprocess
import sys

import numpy as np
import pytest

from vcli.runtime.layers.attention_flashinfer import (
    block_cells,
    import_flashinfer,
    paged_layout,
    used_blocks,
    workspace_bytes,
)
from vcli.topology.errors import UnfitError

SEQ_LENS = np.array([1, 15, 16, 17, 32, 33], dtype=np.int32)


def test_a_full_last_block_counts_all_its_tokens() -> None:
    indptr, last_block_lens = paged_layout(SEQ_LENS, 16)
    assert indptr.tolist() == [0, 1, 2, 3, 5, 7, 10]
    assert last_block_lens.tolist() == [1, 15, 16, 1, 16, 1]
    assert (indptr.dtype, last_block_lens.dtype) == (np.int32, np.int32)


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64])
def test_layout_holds_exactly_the_context(block_size: int) -> None:
    seq_lens = np.arange(1, 200, dtype=np.int32)
    indptr, last_block_lens = paged_layout(seq_lens, block_size)
    assert ((np.diff(indptr) - 1) * block_size + last_block_lens == seq_lens).all()
    assert last_block_lens.min() >= 1
    assert last_block_lens.max() <= block_size


def test_cells_and_used_blocks_leave_out_the_padding() -> None:
    tables = np.arange(1, 25, dtype=np.int32).reshape(6, 4)
    indptr, _ = paged_layout(SEQ_LENS, 16)
    requests, columns = block_cells(indptr)
    expected = [1, 5, 9, 13, 14, 17, 18, 21, 22, 23]
    assert tables[requests, columns].tolist() == expected
    assert used_blocks(tables, indptr).tolist() == expected


def test_a_context_longer_than_its_table_is_our_own_bug() -> None:
    indptr, _ = paged_layout(np.array([33], dtype=np.int32), 16)
    with pytest.raises(AssertionError, match="longer than its table"):
        used_blocks(np.zeros((1, 2), dtype=np.int32), indptr)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "num_decodes", "parts", "tile"),
    [
        (32, 8, 128, 0, 33, 128),  # 132 multiprocessors * 2 / 8 heads
        (32, 8, 256, 0, 33, 64),
        (32, 8, 128, 1, 33, 16),
        (32, 8, 128, 256, 64 + 255, 16),
        (32, 1, 128, 4, 264, 64),
        (128, 1, 64, 300, 300 + 299, 128),
    ],
)
def test_workspace_holds_an_output_and_a_sum_for_each_query_of_each_part(
    num_heads: int, num_kv_heads: int, head_size: int, num_decodes: int, parts: int, tile: int
) -> None:
    size = workspace_bytes(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_decodes=num_decodes,
        num_sms=132,
    )
    assert size == num_heads * parts * tile * (head_size * 4 + 4) + 32


def test_without_flashinfer_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UnfitError) as raised:
        import_flashinfer()
    assert "vcli-toolkit[gpu]" in raised.value.hint


def test_the_back_end_is_imported_without_flashinfer() -> None:
    script = (
        "import sys; sys.modules['flashinfer'] = None\n"
        "import vcli.runtime.layers.attention_flashinfer"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
