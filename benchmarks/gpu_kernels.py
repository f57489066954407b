# ruff: noqa: B023, E402 - the functions are called in the round of the loop that makes them
"""The Triton kernels on one NVIDIA GPU: right or not, then how fast. Needs torch and triton only.

    python benchmarks/gpu_kernels.py [--quick]

Times are microseconds of one call among some twenty in one CUDA graph, median of several replays;
inputs rotate, so that they come from memory and not from the L2 cache. Tables come last.
"""

import argparse
import itertools
import math
import random
import statistics
import sys
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).resolve().parent.parent
try:
    import vcli.runtime.layers.kernels as _  # noqa: F401
except ImportError:
    # Not installed: the folders themselves are the package.
    sys.path.insert(0, str(ROOT))
    package = types.ModuleType("vcli")
    package.__path__ = [str(ROOT)]
    sys.modules["vcli"] = package

from vcli.runtime.layers import activation
from vcli.runtime.layers import kernels as k
from vcli.runtime.layers.kernels import launch
from vcli.runtime.layers.kernels.decode_plan import DecodeTuning
from vcli.runtime.layers.kernels.prefill_attention import PrefillTuning
from vcli.runtime.layers.kernels.skinny_linear import MatrixTuning, VectorTuning

BF16, DEVICE, S = torch.bfloat16, "cuda", 16
ROTATED_BYTES = 300 << 20
LINES: list[str] = []
COMPILE_S: list[float] = []


def say(line=""):
    LINES.append(line)


def count_compilations():
    """Has every compilation add its seconds to `COMPILE_S`."""
    compile_kernel = JITFunction._do_compile

    def timed(self, *arguments, **options):
        begin_s = time.perf_counter()
        kernel = compile_kernel(self, *arguments, **options)
        COMPILE_S.append(time.perf_counter() - begin_s)
        return kernel

    JITFunction._do_compile = timed


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def graph_us(calls, replays=5):
    """Microseconds of a call, each of `calls` once in the graph."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: its garbage collection would take longer than the measurement.
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
        graph.replay()
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def rotated(make, item_bytes, count=20):
    """`count` items, as many of them distinct as leave the cache."""
    distinct = [make() for _ in range(max(1, min(count, math.ceil(ROTATED_BYTES / item_bytes))))]
    return [distinct[index % len(distinct)] for index in range(count)]


def error_of(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


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


def check_rest():
    gate_up = randn(7, 28672)
    say(f"  silu {error_of(k.silu_and_mul(gate_up), activation.silu_and_mul(gate_up)):.1e}")
    x, residual, weight = randn(7, 4096), randn(7, 4096), randn(4096)
    total = x + residual
    expected = F.rms_norm(total.float(), (4096,), eps=1e-6).to(BF16) * weight
    say(f"  norm {error_of(k.add_rms_norm(x, residual, weight, 1e-6)[0], expected):.1e}")
    for rows in (1, 3, 16):
        x, weight = randn(rows, 4096), randn(1000, 4096)
        error = error_of(k.skinny_linear(x, weight), F.linear(x.double(), weight.double()))
        say(f"  skinny M{rows}: {error:.1e}")
    logits, seed = randn(64, 128256), ints([5], torch.int64)
    best, index = k.sample_rows(logits, torch.zeros(64, device=DEVICE), seed, 0, 128256)
    chosen = logits.gather(1, index.long()[:, None])[:, 0]
    say(f"  greedy right: {torch.equal(chosen.float(), best)}")
    probs = torch.tensor([0.5, 0.3, 0.2], device=DEVICE).log().expand(40000, 3).contiguous()
    _, index = k.sample_rows(probs, torch.ones(40000, device=DEVICE), seed, 0, 3)
    say(f"  shares of 0.5 0.3 0.2: {(torch.bincount(index.long()) / 40000).tolist()}")


def planned(space, paged):
    plan = space.plan(len(paged.lens))
    k.plan_decode(plan, paged.rows, paged.lens)
    return plan


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


def time_small(_quick):
    say("  us at T = 1, 32, 256: kernel (torch)")
    table = randn(4096, 128, dtype=torch.float32)
    weight, norm = randn(4096), randn(128)
    seed = ints([5], torch.int64)
    rows = {"norm": [], "rope": [], "rope+norm": [], "silu": [], "greedy": [], "sample": []}
    for count in (1, 32, 256):
        x, residual, gate_up = randn(count, 4096), randn(count, 4096), randn(count, 28672)
        qkv, cache = randn(count, 48, 128), randn(2, 64, S, 8, 128)
        positions = torch.arange(count, device=DEVICE)
        logits = randn(count, 128256)

        def rope(head_norm, qkv=qkv, positions=positions, cache=cache):
            return k.rope_and_cache(
                qkv, positions, table, head_norm, head_norm, 1e-6, positions, cache, 32
            )

        def torch_norm(x=x, residual=residual):
            total = x + residual
            return F.rms_norm(total.float(), (4096,), eps=1e-6).to(BF16) * weight

        zeros, ones = torch.zeros(count, device=DEVICE), torch.ones(count, device=DEVICE)
        pairs = {
            "norm": (lambda: k.add_rms_norm(x, residual, weight, 1e-6), torch_norm),
            "rope": (lambda: rope(None), None),
            "rope+norm": (lambda: rope(norm), None),
            "silu": (lambda: k.silu_and_mul(gate_up), lambda: activation.silu_and_mul(gate_up)),
            "greedy": (
                lambda: k.sample_rows(logits, zeros, seed, 0, 128256),
                lambda: logits.argmax(-1),
            ),
            "sample": (
                lambda: k.sample_rows(logits, ones, seed, 0, 128256),
                lambda: torch.softmax(logits.float(), -1).cumsum(-1),
            ),
        }
        for name, (ours, theirs) in pairs.items():
            beside = f" ({graph_us([theirs] * 20):.1f})" if theirs else ""
            rows[name].append(f"{graph_us([ours] * 20):.1f}{beside}")
    for name, cells in rows.items():
        say(f"  {name:10s} {'  '.join(cells)}")


VECTOR_FORMS = [(2, 1024, 4, 1), (2, 1024, 4, 2), (2, 512, 2, 1), (2, 2048, 4, 1), (1, 4096, 4, 2)]
MATRIX_FORMS = [(64, 128, 4, 6, 1), (64, 128, 4, 6, 2), (64, 64, 4, 8, 1), (128, 128, 8, 4, 1)]
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
SHAPES += [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]


def vector_form(form):
    keys = ("outputs", "inputs", "num_warps", "ahead")
    return VectorTuning(**dict(zip(keys, form, strict=True)))


def matrix_form(form):
    keys = ("outputs", "inputs", "num_warps", "num_stages", "num_splits")
    return MatrixTuning(**dict(zip(keys, form, strict=True)))


def time_skinny(quick):
    say("  (O, I) M: best form us TB/s | default us | cuBLAS us | cuBLAS / best, / default")
    for (outputs, inputs), rows in itertools.product(SHAPES, (1, 2, 8, 32, 64)):
        if rows == 1:
            weights = rotated(lambda o=outputs, i=inputs: randn(o, i), 2 * outputs * inputs)
        x = randn(rows, inputs)
        out = x.new_empty(rows, outputs)
        forms, form_of = VECTOR_FORMS, vector_form
        if rows > 1:
            forms, form_of = MATRIX_FORMS, matrix_form
        found = []
        for form in forms[:2] if quick else forms:
            tuning = form_of(form)
            calls = [
                lambda w=w, t=tuning: k.skinny_linear(x, w, None, out, tuning=t) for w in weights
            ]
            found.append((graph_us(calls, 3), form))
        best, form = min(found)
        default = graph_us([lambda w=w: k.skinny_linear(x, w, None, out) for w in weights])
        theirs = graph_us([lambda w=w: F.linear(x, w) for w in weights])
        say(
            f"  {outputs:6d},{inputs:5d} M{rows:<2d} {form!s:18s} {best:6.1f} "
            f"{2e-6 * outputs * inputs / best:.2f} | {default:6.1f} | {theirs:6.1f} "
            f"| {theirs / best:.2f} {theirs / default:.2f}"
        )


def time_layers(_quick):
    """28 decoder layers of the shape of Qwen3 0.6B, one request of 1,024 tokens, as one graph."""
    paged = Paged([1024])
    layers = [
        [randn(*s) for s in ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))]
        for _ in range(28)
    ]
    norm, head_norm, table = randn(1024), randn(128), randn(4096, 128, dtype=torch.float32)
    plan = planned(k.DecodeWorkspace(1, 16, 8, 128, DEVICE), paged)
    position, slot = ints([1023], torch.int64), ints([5], torch.int64)
    x, residual = randn(1, 1024), randn(1, 1024)

    def layer(weights, linear):
        y, _ = k.add_rms_norm(x, residual, norm, 1e-6)
        qkv = linear(y, weights[0]).view(1, 32, 128)
        q = k.rope_and_cache(
            qkv, position, table, head_norm, head_norm, 1e-6, slot, paged.cache, 16
        )
        y = k.paged_decode(q, paged.cache, paged.tables, plan, 0.09)
        y, _ = k.add_rms_norm(linear(y.flatten(1), weights[1]), residual, norm, 1e-6)
        return linear(k.silu_and_mul(linear(y, weights[2])), weights[3])

    for name, linear in (("cuBLAS", F.linear), ("skinny", k.skinny_linear)):
        outputs = ([], [])
        for is_on in (False, True):
            launch.PdlSwitch.is_on = is_on
            residual.fill_(1.0)
            into = outputs[is_on]
            us = graph_us([lambda w=w: into.append(layer(w, linear)) for w in layers])
            say(f"  {name:8s} PDL {'on ' if is_on else 'off'}: {us:6.1f} us a layer")
        off, on = (torch.stack(tensors) for tensors in outputs)
        say(f"  {name:8s} the same with and without PDL: {torch.equal(off, on)}")
    launch.PdlSwitch.is_on = False


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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few forms of each kernel")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    count_compilations()
    sections = {
        "relative errors: attention": check_attention,
        "relative errors: the rest": check_rest,
        "layers of Qwen3 0.6B, decode": lambda: time_layers(quick),
        "small kernels": lambda: time_small(quick),
        "prefill": lambda: time_prefill(quick),
        "linear, few rows": lambda: time_skinny(quick),
        "decode": lambda: time_decode(quick),
        "FlashInfer decode": lambda: time_flashinfer(quick),
    }
    for name, section in sections.items():
        begin_s = time.perf_counter()
        say(f"{name}:")
        try:
            section()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - border: one section must not hide the others
            say(f"  FAILED: {type(error).__name__}: {str(error)[:300]}")
        say(f"  ({time.perf_counter() - begin_s:.1f} s)")
        torch.cuda.empty_cache()
        print(f"done: {name}", flush=True)
    say(f"{len(COMPILE_S)} kernels compiled in {sum(COMPILE_S):.1f} s")
    print("\n".join(LINES))


if __name__ == "__main__":
    main()
