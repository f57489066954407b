"""Shards of all ranks in one process against the dense layer, filled by their own weight map."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.model_steps import run_ranks
from tests.support.tiny_model import spec_with_heads
from tests.support.weight_files import fill_slices
from vcli.runtime.distributed.virtual import virtual_groups
from vcli.runtime.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vcli.runtime.layers.linear import (
    MergedColumnParallelLinear,
    OutputPart,
    QKVParallelLinear,
    RowParallelLinear,
)
from vcli.runtime.layers.moe import SparseMoe
from vcli.runtime.layers.share import even_share, head_shares
from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import MoeSpec

F32 = {"dtype": torch.float32}


def fill(slices, checkpoint):
    wanted = list(slices)
    for weight in wanted:
        assert tuple(checkpoint[weight.name].shape) == weight.shape
    fill_slices(wanted, checkpoint)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_row_parallel_sum_is_the_dense_output_with_the_bias_once(tp_size):
    checkpoint = {"o.weight": randn(10, 8), "o.bias": randn(10, seed=1) * 100}
    x = randn(5, 8, seed=2)
    shards = []
    for group in virtual_groups("TP", tp_size):
        layer = RowParallelLinear(even_share(8, group, "x"), 10, group=group, has_bias=True, **F32)
        fill(layer.weight_slices("o"), checkpoint)
        shards.append(layer)
    pieces = x.chunk(tp_size, dim=1)
    outputs = run_ranks([lambda s=s, p=p: s(p) for s, p in zip(shards, pieces, strict=True)])
    dense = F.linear(x, checkpoint["o.weight"], checkpoint["o.bias"])
    for output in outputs:
        torch.testing.assert_close(output, dense)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_merged_columns_of_the_ranks_make_up_each_dense_part(tp_size):
    checkpoint = {
        "m.gate.weight": randn(12, 8),
        "m.up.weight": randn(12, 8, seed=1),
        "m.gate.bias": randn(12, seed=2),
        "m.up.bias": randn(12, seed=3),
    }
    x = randn(5, 8, seed=4)
    outputs = []
    for group in virtual_groups("TP", tp_size):
        rows = even_share(12, group, "rows")
        parts = [OutputPart(name=name, rows=rows) for name in ("gate", "up")]
        layer = MergedColumnParallelLinear(8, parts, has_bias=True, **F32)
        fill(layer.weight_slices("m"), checkpoint)
        outputs.append(layer(x).chunk(2, dim=1))
    for index, name in enumerate(("gate", "up")):
        dense = F.linear(x, checkpoint[f"m.{name}.weight"], checkpoint[f"m.{name}.bias"])
        together = torch.cat([output[index] for output in outputs], dim=1)
        torch.testing.assert_close(together, dense)


@pytest.mark.parametrize(
    ("tp_size", "kv_heads_of_ranks"),
    [
        (1, [[0, 1]]),
        (2, [[0], [1]]),
        (4, [[0], [0], [1], [1]]),
        (8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
    ],
)
def test_each_rank_has_the_kv_heads_of_its_query_heads(tp_size, kv_heads_of_ranks):
    head_size, num_heads = 4, 8
    checkpoint = {
        f"a.{name}_proj.weight": randn(heads * head_size, 6, seed=seed)
        for seed, (name, heads) in enumerate((("q", num_heads), ("k", 2), ("v", 2)))
    }
    for group, kv_heads in zip(virtual_groups("TP", tp_size), kv_heads_of_ranks, strict=True):
        heads = head_shares(spec_with_heads(num_heads, 2), group)
        layer = QKVParallelLinear(6, heads=heads, head_size=head_size, has_bias=False, **F32)
        fill(layer.weight_slices("a"), checkpoint)
        assert layer.num_kv_heads == len(kv_heads)
        count = num_heads // tp_size
        first = group.rank_in_group * count
        rows = {
            "q": range(first, first + count),
            "k": kv_heads,
            "v": kv_heads,
        }
        expected = [
            checkpoint[f"a.{name}_proj.weight"].view(-1, head_size, 6)[list(heads)].flatten(0, 1)
            for name, heads in rows.items()
        ]
        assert torch.equal(layer.weight, torch.cat(expected))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size"), [(9, 3, 2), (12, 4, 6), (12, 6, 4)]
)
def test_heads_that_do_not_divide_are_refused_without_a_plan_that_pads_them(
    num_heads, num_kv_heads, tp_size
):
    group = virtual_groups("TP", tp_size)[0]
    with pytest.raises(ConfigError, match="divide"):
        head_shares(spec_with_heads(num_heads, num_kv_heads), group)


@pytest.mark.parametrize("vocab_size", [16, 13, 5])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_embedding_and_head_hold_for_vocabularies_that_do_not_divide(vocab_size, tp_size):
    checkpoint = {"e": randn(vocab_size, 6)}
    ids, hidden = torch.arange(vocab_size), randn(3, 6, seed=1)

    def run(group):
        rows = even_share(vocab_size, group, "vocab_size", padded=16)
        embedding = VocabParallelEmbedding(rows, 6, group=group, **F32)
        embedding.weight.fill_(float("nan"))
        fill(embedding.weight_slices("e"), checkpoint)
        assert (embedding.weight[rows.count :] == 0).all()
        head = ParallelLMHead(rows, 6, group=group, tied_to=embedding, **F32)
        return embedding(ids), head.compute_logits(hidden)

    groups = virtual_groups("TP", tp_size)
    for embedded, logits in run_ranks([lambda g=g: run(g) for g in groups]):
        assert torch.equal(embedded, checkpoint["e"])
        torch.testing.assert_close(logits, hidden @ checkpoint["e"].T)


def dense_experts(x, checkpoint, moe):
    """One token, one expert at a time."""
    probabilities = torch.softmax(x @ checkpoint["m.gate.weight"].T, dim=-1)
    output = torch.zeros_like(x)
    for token, row in enumerate(probabilities):
        chosen = row.argsort(descending=True)[: moe.num_experts_per_token]
        weights = row[chosen] / (row[chosen].sum() if moe.norm_topk_prob else 1.0)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up, down = (
                checkpoint[f"m.experts.{expert}.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            )
            output[token] += weight * (down @ (F.silu(gate @ x[token]) * (up @ x[token])))
    return output


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_experts_equal_a_loop_over_tokens(norm_topk_prob, tp_size):
    moe = MoeSpec(
        num_experts=6,
        num_experts_per_token=3,
        intermediate_size=10,
        norm_topk_prob=norm_topk_prob,
    )
    checkpoint = {"m.gate.weight": randn(6, 8, seed=50)}
    for expert in range(6):
        for seed, (name, shape) in enumerate(
            (("gate", (10, 8)), ("up", (10, 8)), ("down", (8, 10)))
        ):
            checkpoint[f"m.experts.{expert}.{name}_proj.weight"] = randn(
                *shape, seed=10 * expert + seed
            )
    x = randn(9, 8, seed=99)

    def run(group):
        columns = even_share(10, group, "columns", padded=24)
        layer = SparseMoe(moe, 8, columns=columns, group=group, **F32)
        fill(layer.weight_slices("m"), checkpoint)
        return layer(x)

    for output in run_ranks([lambda g=g: run(g) for g in virtual_groups("TP", tp_size)]):
        torch.testing.assert_close(output, dense_experts(x, checkpoint, moe), rtol=1e-4, atol=1e-4)
