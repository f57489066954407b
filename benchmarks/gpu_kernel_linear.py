# ruff: noqa: B023 - the functions are called in the round of the loop that makes them
"""Products of few rows: each form beside the default one and cuBLAS."""

import itertools

import torch.nn.functional as F
from gpu_kernel_timing import graph_us, randn, rotated, say

from vcli.runtime.layers import kernels as k
from vcli.runtime.layers.kernels.skinny_linear import MatrixTuning, VectorTuning

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
