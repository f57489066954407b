# ruff: noqa: B023 - the functions are called in the round of the loop that makes them
"""The small kernels, and whole decoder layers with and without overlapping kernels."""

import torch
import torch.nn.functional as F
from gpu_kernel_attention import Paged, S, planned
from gpu_kernel_timing import BF16, DEVICE, error_of, graph_us, ints, randn, say

from vcli.runtime.layers import activation
from vcli.runtime.layers import kernels as k
from vcli.runtime.layers.kernels import launch


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
