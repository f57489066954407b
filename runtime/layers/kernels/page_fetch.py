# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment
# ruff: noqa: ANN001, ANN201, PLR0917, RUF005, SIM102
"""Brings pages of keys and values into the shared memory of a Hopper GPU, ahead of who needs them.

A tile of (TILE, E) stands there chunk by chunk, 64 columns each, as `wgmma` wants it: the rows of
a page within a chunk are one piece, and one order for the tensor memory accelerator.
"""

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from vcli.runtime.layers.kernels.gluon_names import load_tile, reinterpret

#: Elements of a row of shared memory: 128 bytes, over which addresses are swizzled.
CHUNK = 64
#: Of a thread of the warp that fetches; the others get what it leaves.
FETCH_REGISTERS = 24


@gluon.jit
def page_pieces(tiles, S: gl.constexpr, CHUNK: gl.constexpr):
    """The pieces of `tiles` (stages, TILE, E) that pages fill: (S, CHUNK) each."""
    NUM_PIECES: gl.constexpr = tiles.shape[0] * (tiles.shape[2] // CHUNK) * (tiles.shape[1] // S)
    return reinterpret(tiles, [NUM_PIECES, S, CHUNK])


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Of a ring of `STAGES` buffers; the phase of its barriers changes with each round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def fetch_pages(
    cache, keys, values, full, empty, table, start, end, context_len, column, value_rows,
    CHUNK: gl.constexpr, TILE: gl.constexpr, S: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """What the warp that fetches does: the tiles of tokens [start, end), `STAGES` under way.

    `keys` and `values` are pieces. With `WAITS`, it waits for the kernel before this one only
    where it comes to the last token: the one that a step of decodes has just written.
    """
    NUM_PAGES: gl.constexpr = TILE // S
    stage, phase = 0, 1
    for first in range(start, end, TILE):
        blocks = ()
        for page in gl.static_range(NUM_PAGES):
            inside = first + page * S < context_len
            blocks = blocks + (gl.load(table + first // S + page, mask=inside, other=0),)
        if WAITS:
            if first + TILE >= end:
                gdc_wait()
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, 2 * 2 * TILE * E)
        for page in gl.static_range(NUM_PAGES):
            # What lies outside the cache is filled with zeros, and counts as fetched.
            inside = first + page * S < context_len
            row = gl.where(inside, blocks[page] * S, -S - value_rows)
            for chunk in gl.static_range(E // CHUNK):
                piece = (stage * (E // CHUNK) + chunk) * NUM_PAGES + page
                at = column + chunk * CHUNK
                load_tile(cache, [row, at], bar, keys.index(piece))
                load_tile(cache, [row + value_rows, at], bar, values.index(piece))
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def forget_unwritten(tile, first, end, wide: gl.constexpr, TILE: gl.constexpr):
    """Zeroes the rows of `tile` from token `end` on; `first` is its first token.

    Slots that a request never wrote may hold NaN, which a weight of 0 would not take away.
    """
    token = first + gl.arange(0, TILE, gl.SliceLayout(1, wide))
    tile.store(gl.where((token < end)[:, None], tile.load(wide), 0.0))


class Descriptors:
    """Made once for each cache, and forgotten with it: making one takes 10 us on the host."""

    def __init__(self) -> None:
        self._of = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, kv_cache: torch.Tensor) -> TensorDescriptor:
        """Rows are the tokens of the keys, then those of the values; columns all their heads."""
        descriptor = self._of.get(kv_cache)
        if descriptor is None:
            # Detached: a view would keep the cache, and with it its own entry.
            rows = kv_cache.flatten(3).flatten(0, 2).detach()
            layout = gl.NVMMASharedLayout(2 * CHUNK, 16, 2)
            block = [kv_cache.shape[2], CHUNK]
            descriptor = TensorDescriptor.from_tensor(rows, block, layout)
            self._of[kv_cache] = descriptor
        return descriptor


DESCRIPTORS = Descriptors()
