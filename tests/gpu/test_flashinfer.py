"""FlashInfer's kernels against the reference back end in float32.

The first run on a machine compiles them, half a minute for each dtype and head size.
"""

import itertools
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from vcli.runtime.layers.attention import ForwardMetadata
from vcli.runtime.layers.attention_flashinfer import FlashInferAttention
from vcli.runtime.layers.attention_torch import TorchAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed"),
    pytest.mark.filterwarnings("default"),
]

BLOCK_SIZE = 16
MAX_BLOCKS = 80
NUM_HEADS, NUM_KV_HEADS = 8, 2
CASES = list(itertools.product((torch.bfloat16, torch.float16), (64, 128)))
DECODES = [1, 15, 16, 17, 300, 1279]


class Setting:
    """A cache of random keys and values, and tables of shuffled blocks of it."""

    def __init__(self, dtype: torch.dtype, head_size: int, num_requests: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.generator = torch.Generator(self.device).manual_seed(7)
        self.dtype, self.head_size = dtype, head_size
        num_blocks = num_requests * MAX_BLOCKS + 1
        self.kv_cache = self.random(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, head_size)
        blocks = np.random.default_rng(7).permutation(num_blocks - 1).astype(np.int32) + 1
        self.tables = blocks.reshape(num_requests, MAX_BLOCKS)
        self.scale = 0.7 * head_size**-0.5  # not what FlashInfer would take by itself
        self.backend = FlashInferAttention(
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_size=head_size,
            dtype=dtype,
            device=self.device,
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(
            shape, generator=self.generator, device=self.device, dtype=torch.float32
        ).to(self.dtype)

    def queries(self, num_tokens: int) -> torch.Tensor:
        """Strided as the queries of one projection for queries, keys and values are."""
        heads = NUM_HEADS + 2 * NUM_KV_HEADS
        return self.random(num_tokens, heads, self.head_size)[:, :NUM_HEADS]

    def metadata(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], rows: Sequence[int] | None = None
    ) -> ForwardMetadata:
        starts = np.cumsum([0, *query_lens], dtype=np.int32)
        return ForwardMetadata(
            num_tokens=int(starts[-1]),
            num_requests=len(query_lens),
            query_start_loc=torch.from_numpy(starts).to(self.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            block_tables=torch.from_numpy(self.tables).to(self.device),
            rows=None
            if rows is None
            else torch.tensor(rows, dtype=torch.int32, device=self.device),
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device=self.device),
            block_size=BLOCK_SIZE,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_cpu=list(query_lens),
            seq_lens_cpu=list(seq_lens),
        )

    def assert_right(
        self, output: torch.Tensor, query: torch.Tensor, metadata: ForwardMetadata
    ) -> None:
        reference = TorchAttention()
        expected = reference.attend(
            query.float().contiguous(),
            self.kv_cache.float(),
            reference.plan(metadata),
            self.scale,
        )
        assert output.dtype == self.dtype
        error = (output.float() - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
        assert error.max().item() < 2e-2, error.tolist()


@pytest.mark.parametrize(("dtype", "head_size"), CASES)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        pytest.param([1] * len(DECODES), DECODES, id="decodes"),
        pytest.param([1, 16, 100, 700], [1, 16, 100, 700], id="new prompts"),
        pytest.param([5, 33, 200], [37, 64, 1200], id="cached context"),
        pytest.param([1, 300, 1, 1, 17], [900, 300, 16, 1279, 49], id="mixed"),
    ],
)
def test_eager_steps(
    dtype: torch.dtype, head_size: int, query_lens: list[int], seq_lens: list[int]
) -> None:
    setting = Setting(dtype, head_size, len(query_lens))
    metadata = setting.metadata(query_lens, seq_lens)
    query = setting.queries(metadata.num_tokens)
    plan = setting.backend.plan(metadata)
    output = setting.backend.attend(query, setting.kv_cache, plan, setting.scale)
    setting.assert_right(output, query, metadata)


def test_requests_are_found_by_their_rows() -> None:
    setting = Setting(torch.bfloat16, 128, 4)
    metadata = setting.metadata([1, 40], [700, 90], rows=[3, 1])
    query = setting.queries(41)
    plan = setting.backend.plan(metadata)
    output = setting.backend.attend(query, setting.kv_cache, plan, setting.scale)
    setting.tables = setting.tables[[3, 1]]
    plain = setting.metadata([1, 40], [700, 90])
    setting.assert_right(output, query, plain)


def test_rows_of_no_request_are_zero() -> None:
    setting = Setting(torch.bfloat16, 128, 1)
    plan = setting.backend.plan(setting.metadata([3], [3]))
    output = setting.backend.attend(setting.queries(8), setting.kv_cache, plan, setting.scale)
    assert not output[3:].any()
    assert output[:3].any(-1).all()


def test_steps_in_flight_keep_their_own_plans() -> None:
    setting = Setting(torch.bfloat16, 128, 3)
    steps = [
        setting.metadata(query_lens, seq_lens)
        for query_lens, seq_lens in (
            ([1, 1, 1], [5, 600, 1279]),
            ([40, 1, 1], [40, 1279, 3]),
            ([1, 1, 1], [1279, 17, 900]),
        )
    ]
    queries = [setting.queries(metadata.num_tokens) for metadata in steps]
    torch.cuda.synchronize()
    outputs = []
    torch.cuda._sleep(200_000_000)  # the device is behind the host
    for metadata, query in zip(steps, queries, strict=True):
        plan = setting.backend.plan(metadata)
        outputs.append(setting.backend.attend(query, setting.kv_cache, plan, setting.scale))
    for metadata, query, output in zip(steps, queries, outputs, strict=True):
        setting.assert_right(output, query, metadata)


@pytest.mark.parametrize(("dtype", "head_size"), CASES)
def test_a_graph_is_replayed_with_other_lengths(dtype: torch.dtype, head_size: int) -> None:
    setting = Setting(dtype, head_size, len(DECODES))
    backend, scale = setting.backend, setting.scale
    metadata = setting.metadata([1] * len(DECODES), [1] * len(DECODES))
    plan = backend.capture_plan(metadata)
    query = setting.queries(len(DECODES))
    backend.attend(query, setting.kv_cache, plan, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.attend(query, setting.kv_cache, plan, scale)

    outputs, queries, all_lens = [], [], []
    for shift in range(4):
        seq_lens = DECODES[shift:] + [1] * shift  # the last rows are padding
        tables = setting.tables.copy()
        tables[len(DECODES) - shift :] = 0
        query.copy_(setting.queries(len(DECODES)))
        backend.update_plan(plan, np.array(seq_lens, dtype=np.int32), tables)
        if shift == 1:
            torch.cuda._sleep(200_000_000)  # the rest is planned while this replay waits
        graph.replay()
        outputs.append(captured.clone())
        queries.append(query.clone())
        all_lens.append(seq_lens)

    for output, asked, seq_lens in zip(outputs, queries, all_lens, strict=True):
        num_real = sum(length > 1 for length in seq_lens[1:]) + 1
        real = setting.metadata([1] * num_real, seq_lens[:num_real])
        setting.assert_right(output[:num_real], asked[:num_real], real)
        assert output.isfinite().all()


def test_graphs_of_several_sizes_and_eager_steps_take_turns() -> None:
    setting = Setting(torch.bfloat16, 128, 8)
    backend = setting.backend
    graphs = {}
    for size in (8, 4, 1):
        metadata = setting.metadata([1] * size, [1] * size)
        plan = backend.capture_plan(metadata)
        query = setting.queries(size)
        backend.attend(query, setting.kv_cache, plan, setting.scale)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = backend.attend(query, setting.kv_cache, plan, setting.scale)
        graphs[size] = graph, plan, query, output

    for turn, size in enumerate((1, 8, 4, 8, 1)):
        graph, plan, query, output = graphs[size]
        seq_lens = [(200 * turn + 131 * row) % 1279 + 1 for row in range(size)]
        backend.update_plan(plan, np.array(seq_lens, dtype=np.int32), setting.tables[:size])
        graph.replay()
        setting.assert_right(output, query, setting.metadata([1] * size, seq_lens))
        eager = setting.metadata([30, 1], [30 + turn, 500])
        eager_query = setting.queries(31)
        eager_output = backend.attend(
            eager_query, setting.kv_cache, backend.plan(eager), setting.scale
        )
        setting.assert_right(eager_output, eager_query, eager)
