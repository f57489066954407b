"""The batch sizes that get a CUDA graph, as the plan counts them and the runner captures them."""

from typing import Final

_SMALL_SIZES: Final = (1, 2, 4)
_STEP: Final = 8
_LARGE: Final = 256
_LARGE_STEP: Final = 16
LARGEST: Final = 512


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph, ascending; the last one holds `max_num_seqs` if any does."""
    sizes = [*_SMALL_SIZES, *range(_STEP, _LARGE, _STEP), *range(_LARGE, LARGEST + 1, _LARGE_STEP)]
    smaller = [size for size in sizes if size < max_num_seqs]
    larger = [size for size in sizes if size >= max_num_seqs]
    return smaller + larger[:1]
