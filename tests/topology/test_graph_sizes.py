"""Which steps get CUDA graphs."""

import pytest

from tests.support.topo_runs import LLAMA_8B
from vcli.topology.graph_sizes import graph_sizes, prompt_graph_sizes
from vcli.topology.model_spec import model_spec_from_config
from vcli.topology.sizes import ParallelSizes

SPEC = model_spec_from_config(LLAMA_8B, source="config.json")


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100, 256, 500, 512])
def test_the_largest_batch_of_decodes_has_a_graph(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= max_num_seqs
    assert all(size < max_num_seqs for size in sizes[:-1])


def test_prompts_have_graphs_up_to_where_the_device_takes_longer_than_the_host() -> None:
    # 218,103,808 numbers in the matrices of a layer: 0.28 T operations are 641 tokens.
    assert prompt_graph_sizes(SPEC, ParallelSizes(), 8192) == [
        *(16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    ]


def test_ranks_that_share_a_layer_launch_as_many_kernels_for_less_work() -> None:
    halves = prompt_graph_sizes(SPEC, ParallelSizes(tensor_parallel_size=2), 8192)
    assert halves[-3:] == [512, 768, 1024]


@pytest.mark.parametrize(("most", "last"), [(500, [256, 384, 500]), (96, [48, 64, 96]), (9, [9])])
def test_a_full_step_has_its_own(most: int, last: list[int]) -> None:
    sizes = prompt_graph_sizes(SPEC, ParallelSizes(), most)
    assert sizes[-3:] == last
    assert sizes == sorted(set(sizes))
