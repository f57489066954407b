"""Triton kernels for NVIDIA GPUs. Importing this package imports triton: do it only on CUDA.

No kernel needs a plan from the host: lengths, rows and block tables are read on the device, so a
whole decode step can be one CUDA graph.

Shapes: T tokens of the batch, R requests, N rows, H query heads here, K kv heads here, G query
heads of one kv head (H = K * G), E head size, D hidden, V vocabulary here, B blocks, S block size.
A KV cache is (2, B, S, K, E): keys, then values. Its strides are free but for the last, so a cache
stored as (2, B, K, S, E) is passed as `stored.transpose(2, 3)`.
"""

from vcli.runtime.layers.kernels.activation import silu_and_mul
from vcli.runtime.layers.kernels.decode_attention import paged_decode
from vcli.runtime.layers.kernels.decode_inputs import prepare_decode
from vcli.runtime.layers.kernels.decode_plan import (
    DecodePlan,
    DecodeWorkspace,
    plan_decode,
)
from vcli.runtime.layers.kernels.norm import add_rms_norm
from vcli.runtime.layers.kernels.prefill_attention import paged_prefill
from vcli.runtime.layers.kernels.rotary import rope_and_cache
from vcli.runtime.layers.kernels.sampling import sample_rows
from vcli.runtime.layers.kernels.skinny_linear import can_use_skinny, skinny_linear

__all__ = [
    "DecodePlan",
    "DecodeWorkspace",
    "add_rms_norm",
    "can_use_skinny",
    "paged_decode",
    "paged_prefill",
    "plan_decode",
    "prepare_decode",
    "rope_and_cache",
    "sample_rows",
    "silu_and_mul",
    "skinny_linear",
]
