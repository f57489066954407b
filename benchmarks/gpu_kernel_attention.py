# ruff: noqa: B023 - the functions are called in the round of the loop that makes them
"""Attention over the paged cache: right or not, then each tuning of decode and prefill."""

import itertools
import random

import torch
import torch.nn.functional as F
from gpu_kernel_timing import BF16, DEVICE, error_of, graph_us, ints, randn, rotated, say

from vcli.runtime.layers import kernels as k
from vcli.runtime.layers.kernels.decode_plan import DecodeTuning
from vcli.runtime.layers.kernels.prefill_attention import PrefillTuning

S = 16


class Paged:
    """A filled cache and shuffled tables for contexts of `seq_lens`."""

    def __init__(self, seq_lens, kv_heads=8, head_size=128, *, heads_first=False):
        counts = [-(-length // S) for length in seq_lens]
        order = torch.randperm(sum(counts), dtype=torch.int32)
        tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
        for row, blocks in enumerate(order.split(counts)):
            tables[row, : len(blocks)] = blocks
        shape = (2, sum(counts), S, kv_heads, head_size)
        if heads_first:
            self.cache = randn(2, sum(counts), kv_heads, S, head_size).transpose(2, 3)
        else:
            self.cache = randn(*shape)
        self.tables, self.lens = tables.to(DEVICE), ints(seq_lens)
        self.rows = torch.arange(len(seq_lens), device=DEVICE, dtype=torch.int32)
        self.bytes = sum(seq_lens) * kv_heads * head_size * 4

    def context(self, row):
        length = int(self.lens[row])
        blocks = self.tables[row, : -(-length // S)].long()
        return self.cache[:, blocks].flatten(1, 2)[:, :length]

    def reference(self, row, query_QHE, scale):
        key, value = self.context(row).transpose(1, 2).double()
        group = query_QHE.shape[1] // len(key)
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        scores = query_QHE.double().transpose(0, 1) @ key.transpose(1, 2) * scale
        count, length = scores.shape[1:]
        scores += torch.full_like(scores, -torch.inf).triu(length - count + 1)
        return (scores.softmax(-1) @ value).transpose(0, 1)


def lengths(kind, count):
    """`mixed+500`: prompts of 100-1,024 tokens, 500 steps later; else all of the same length."""
    if not kind.startswith("mixed+"):
        return [int(kind)] * count
    generator = random.Random(0)
    return [generator.randint(100, 1024) + int(kind[6:]) for _ in range(count)]


def planned(space, paged):
    plan = space.plan(len(paged.lens))
    k.plan_decode(plan, paged.rows, paged.lens)
    return plan


def check_attention():
    for heads, kv_heads, size in ((32, 8, 128), (16, 8, 128), (28, 4, 128), (8, 8, 64)):
        lens = [1, 5000, 16, 17, 900]
        paged, query = Paged(lens, kv_heads, size), randn(5, heads, size)
        space = k.DecodeWorkspace(256, heads, kv_heads, size, DEVICE)
        arguments = (paged.cache, paged.tables, paged.rows)
        worst = 0.0
        for _ in range(3):
            plan = planned(space, paged)
            out = k.paged_decode(query, paged.cache, paged.tables, plan, 0.09)
            errors = [
                error_of(out[i], paged.reference(i, query[i : i + 1], 0.09)[0]) for i in range(5)
            ]
            worst = max(worst, *errors)
        say(f"  decode  H{heads} K{kv_heads} E{size}: {worst:.1e}")
        counts = [1, 700, 16, 3, 900]
        starts = [0, *itertools.accumulate(counts)]
        query = randn(starts[-1], heads, size)
        out = k.paged_prefill(query, *arguments, ints(starts), paged.lens, 900, 0.09)
        errors = [
            error_of(out[a:b], paged.reference(i, query[a:b], 0.09))
            for i, (a, b) in enumerate(itertools.pairwise(starts))
        ]
        say(f"  prefill H{heads} K{kv_heads} E{size}: {max(errors):.1e}")


def decode_calls(kind, num_requests, heads, tuning, cache, *, heads_first=False):
    key = (kind, num_requests, heads_first)
    if key not in cache:
        cache.clear()
        torch.cuda.empty_cache()
        lens = lengths(kind, num_requests)
        one = Paged(lens, heads_first=heads_first)
        rest = rotated(lambda: Paged(lens, heads_first=heads_first), one.bytes)
        cache[key] = rest
    query = randn(num_requests, heads, 128)
    # All caches hold contexts of the same lengths in the same rows: one plan is right for each.
    plan = planned(k.DecodeWorkspace(256, heads, 8, 128, DEVICE, tuning), cache[key][0])
    return [
        lambda p=p: k.paged_decode(query, p.cache, p.tables, plan, 0.09) for p in cache[key]
    ], cache[key][0].bytes


def time_decode(quick):
    forms = [(64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 1, 2), (32, 1, 3), (32, 2, 3), (32, 4, 4)]
    forms += [(64, 2, 2), (64, 2, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3), (16, 1, 4)]
    tunings = [
        DecodeTuning(tile=t, num_warps=w, num_stages=s, min_split_tokens=max(t, 64), num_programs=p)
        for t, w, s in (forms[:2] if quick else forms)
        for p in (528, 1056, 2112, 4224)
    ]
    cache = {}
    for num_requests, kind in (
        (1, "1024"),
        (8, "1024"),
        (32, "1024"),
        (48, "mixed+820"),
        (145, "mixed+500"),
        (256, "mixed+65"),
    ):
        found = []
        for tuning in tunings:
            calls, size = decode_calls(kind, num_requests, 32, tuning, cache)
            found.append((graph_us(calls, 3), tuning))
        found.sort(key=lambda pair: pair[0])
        say(f"  R{num_requests} x {kind}, best (tile warps stages programs):")
        for us, t in found[:5]:
            name = f"{t.tile} {t.num_warps} {t.num_stages} {t.num_programs}"
            say(f"    {name:16s} {us:7.1f} us  {size / us / 1e6:.2f} TB/s")
    say("  the default tuning, H32 | H16 | H32 with the cache (2,B,K,S,E):")
    for num_requests, kind in (
        *itertools.product((1, 8, 32, 128, 256), ("256", "1024")),
        *((17, "mixed+955"), (48, "mixed+820"), (82, "mixed+710"), (145, "mixed+500")),
        (256, "mixed+65"),
    ):
        row = f"  R{num_requests:<4d} x {kind:6s}"
        for heads, heads_first in ((32, False), (16, False), (32, True)):
            calls, size = decode_calls(
                kind, num_requests, heads, None, cache, heads_first=heads_first
            )
            us = graph_us(calls)
            row += f" | {us:7.1f} us {size / us / 1e6:.2f} TB/s"
        say(row)


def time_prefill(quick):
    say("  TFLOP/s (causal half counted); torch: one sequence of SDPA")
    for count, length in ((32, 512), (1, 8192)):
        paged, query = Paged([length] * count), randn(count * length, 32, 128)
        starts = ints([index * length for index in range(count + 1)])
        flops = 2 * 32 * 128 * length * (length + 1) * count
        forms = [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 128, 4, 2)]
        forms += [(128, 128, 8, 2), (128, 32, 8, 5), (128, 64, 8, 2)]
        for rows, tile, warps, stages in forms[:1] if quick else forms:
            tuning = PrefillTuning(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
            call = lambda t=tuning: k.paged_prefill(  # noqa: E731
                query,
                paged.cache,
                paged.tables,
                paged.rows,
                starts,
                paged.lens,
                length,
                0.09,
                tuning=t,
            )
            try:
                us = graph_us([call] * 4)
                say(f"  {count} x {length} {rows} {tile} {warps} {stages}: {flops / us / 1e6:.0f}")
            except Exception as error:  # noqa: BLE001 - border: one form must not hide the others
                say(f"  {count} x {length} {rows} {tile} {warps} {stages}: {error!r:.80}")
        q = randn(1, 32, length, 128)
        key, value = randn(2, 1, 32, length, 128)
        us = graph_us([lambda: F.scaled_dot_product_attention(q, key, value, is_causal=True)] * 4)
        say(f"  torch 1 x {length}: {flops / count / us / 1e6:.0f}")


def time_flashinfer(_quick):
    import flashinfer

    for num_requests, kind in ((32, "1024"), (256, "mixed+65")):
        lens = lengths(kind, num_requests)
        paged, query = Paged(lens), randn(num_requests, 32, 128)
        counts = [-(-length // S) for length in lens]
        indices = torch.cat([paged.tables[row, :count] for row, count in enumerate(counts)])
        space = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        last = ints([(length - 1) % S + 1 for length in lens])
        starts = ints([0, *itertools.accumulate(counts)])
        wrapper.plan(starts, indices, last, 32, 8, 128, S, q_data_type=BF16, kv_data_type=BF16)
        both = (paged.cache[0], paged.cache[1])
        us = graph_us([lambda: wrapper.run(query, both)] * 20)
        say(f"  R{num_requests} x {kind}: {us:.1f} us, {paged.bytes / us / 1e6:.2f} TB/s")
