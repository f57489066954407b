# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201
"""What Gluon calls differently from one Triton to the next (3.6 to 3.9 are known)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Waits for the warps of a function.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
#: Has the tensor memory accelerator bring a tile, and tell a barrier.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

#: Whether the method has lost its underscore.
IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, shape: gl.constexpr):
    """The same shared memory in another shape."""
    if IS_PUBLIC:
        return memory.reinterpret(memory.dtype, shape, memory.layout)
    else:
        return memory._reinterpret(memory.dtype, shape, memory.layout)
