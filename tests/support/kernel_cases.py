"""What the tests of the Triton kernels share; importing it skips where no kernel can run.

On a GPU where there is one, else interpreted: TRITON_INTERPRET=1, with triton and a numpy below 2.4
on the path.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

# The interpreter turns arrays of one element into numbers, which numpy 2.4 refuses.
KERNEL_MARKS = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("seeded"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts bfloat16 instead of rounding it, and multiplies its bits as integers.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
DTYPE = DTYPES[-1]
BLOCK_SIZE = 16
INF, NAN = float("inf"), float("nan")


def randn(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_near(actual, expected, tolerance=1e-2):
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, f"relative error {error:.2e}"


class PagedCache:
    """Contexts of some requests in scattered blocks; whatever no request owns is NaN."""

    def __init__(self, seq_lens, kv_heads, head_size, dtype=DTYPE, *, heads_first=False):
        self.seq_lens, self.num_rows = seq_lens, len(seq_lens) + 2
        needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
        num_blocks, width = sum(needed) + 3, max(needed) + 2
        shape = (2, num_blocks, BLOCK_SIZE, kv_heads, head_size)
        if heads_first:
            stored = torch.full((*shape[:2], kv_heads, BLOCK_SIZE, head_size), NAN, dtype=dtype)
            self.cache = stored.to(DEVICE).transpose(2, 3)
        else:
            self.cache = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
        free = torch.randperm(num_blocks).tolist()
        # Columns past a request's blocks name blocks that do not exist.
        tables = torch.full((self.num_rows, width), 2**30, dtype=torch.int32)
        self.rows = torch.randperm(self.num_rows)[: len(seq_lens)].int()
        self.keys, self.values = [], []
        for row, length, count in zip(self.rows.tolist(), seq_lens, needed, strict=True):
            blocks = [free.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            key, value = (randn(length, kv_heads, head_size, dtype=dtype) for _ in range(2))
            self.keys.append(key)
            self.values.append(value)
            for position in range(length):
                block, offset = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.cache[0, block, offset] = key[position]
                self.cache[1, block, offset] = value[position]
        self.tables, self.rows = tables.to(DEVICE), self.rows.to(DEVICE)

    def attend(self, request, query_QHE, scale):
        """Causal attention of the last tokens of a request, in float64."""
        group = query_QHE.shape[1] // self.keys[request].shape[1]
        key = self.keys[request].double().repeat_interleave(group, 1)
        value = self.values[request].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhe,lhe->hql", query_QHE.double(), key) * scale
        count, length = len(query_QHE), len(key)
        position = torch.arange(length - count, length, device=DEVICE)
        hidden = torch.arange(length, device=DEVICE)[None, :] > position[:, None]
        weights = scores.masked_fill(hidden, -INF).softmax(-1)
        return torch.einsum("hql,lhe->qhe", weights, value)
