"""The steps that get CUDA graphs, as the plan counts them and the runner captures them."""

from typing import Final

from vcli.topology.memory import layer_parameters
from vcli.topology.model_spec import ModelSpec
from vcli.topology.sizes import ParallelSizes

_SMALL_SIZES: Final = (1, 2, 4)
_STEP: Final = 8
_LARGE: Final = 256
_LARGE_STEP: Final = 16
LARGEST: Final = 512

_FEWEST_TOKENS: Final = 16
#: Operations of a layer's products that take an H200 as long as a host takes to launch the layer
#: kernel by kernel: 0.4 ms at 700 TFLOP/s (docs/benchmarks.md). Longer steps gain nothing.
_HOST_BOUND_OPS: Final = 0.4e-3 * 700e12


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of decodes worth a graph, ascending; the last one holds `max_num_seqs` if any."""
    sizes = [*_SMALL_SIZES, *range(_STEP, _LARGE, _STEP), *range(_LARGE, LARGEST + 1, _LARGE_STEP)]
    smaller = [size for size in sizes if size < max_num_seqs]
    larger = [size for size in sizes if size >= max_num_seqs]
    return smaller + larger[:1]


def prompt_graph_sizes(
    spec: ModelSpec, parallel: ParallelSizes, max_num_batched_tokens: int
) -> list[int]:
    """Tokens of steps with prompts worth graphs, ascending: powers of two, and halfway between."""
    most = min(
        int(_HOST_BOUND_OPS / (2 * layer_parameters(spec, parallel))), max_num_batched_tokens
    )
    sizes = []
    size = _FEWEST_TOKENS
    while size <= most:
        sizes += [size, size + size // 2]
        size *= 2
    sizes = [size for size in sizes if size <= most]
    # A full step is the most frequent one of a long queue.
    if most == max_num_batched_tokens and most not in sizes:
        sizes.append(most)
    return sizes
