"""Sum over the ranks' GPUs, add the residual, RMS norm: one Triton kernel, one barrier.

Each program has rows of its own and talks only to the program of its number on the other GPUs. It
writes its rows into a region of theirs (a write over NVLink is not waited for, a read is), raises
a flag there, waits for their flags here, and sums what came in the order of the ranks. No rank
reads another's memory, so `x` may stand anywhere.

Why nothing is overwritten too early. A program counts its calls in device memory; the count gives
the half of the regions (even, odd) and is the value of the flag. It writes call n+2 into the half
of call n only after its own call n+1 has ended, which waited for every peer's flag n+1; a peer
raises that in its kernel n+1, after its kernel n, the one that reads call n, has ended. Kernels of
one rank run one after the other on one stream. The same holds for the flags, which are one per
half, so that a peer which is a call ahead cannot hide the flag that is still waited for. The count
is read on the device: a captured graph can be replayed any number of times, in any order with
other graphs, as long as all ranks replay the same.

Memory order. The barrier of the block and the release at system scope make all stores of the block
visible before the flag; the acquire at system scope and the barrier after it order the loads of
all threads behind it. The loads go past the first-level cache, which peers do not invalidate.

A dead peer's flag never comes. After `max_polls` looks the program gives up: it notes the peer in
`status` and writes NaN. At the start, where the kernel is tried, that takes seconds and the group
falls back; later the bound is beyond every deadline of the host, which then ends the process (a
process that is killed takes its kernels with it).
"""

# No `from __future__ import annotations`: Triton looks at `tl.constexpr` itself.

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _push(  # noqa: PLR0917 - Triton's functions have positions only
    x_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    first: tl.tensor,
    call: tl.tensor,
    num_rows: tl.tensor,
    row_size: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    REGION: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """This program's rows into its region on every peer, then its flag there."""
    dtype = x_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    row, row_here = tl.program_id(0), 0
    while row < num_rows:
        x = tl.load(x_ptr + row * row_size + columns, mask=columns < row_size, other=0.0)
        for step in tl.static_range(1, WORLD):
            there = tl.load(bases_ptr + (RANK + step) % WORLD).to(tl.pointer_type(dtype))
            there = tl.multiple_of(there, 16) + (first + RANK) * REGION + row_here * row_size
            tl.store(there + columns, x, mask=columns < row_size)
        row += tl.num_programs(0)
        row_here += 1
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        flags = tl.load(bases_ptr + (RANK + step) % WORLD) + FLAGS_AT
        flag = flags.to(tl.pointer_type(tl.int32)) + first + RANK
        tl.atomic_xchg(flag, call, sem="release", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def _await_peers(  # noqa: PLR0917 - as above
    flags: tl.tensor,
    call: tl.tensor,
    max_polls: tl.tensor,
    status_ptr: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
) -> tl.tensor:
    """Returns when all peers have raised their flag: 0, or not-a-number where one did not.

    All of them together get `max_polls`: a call ends in time, however many are lost.
    """
    lost = 0.0
    polls = 0
    for step in tl.static_range(1, WORLD):
        peer = (RANK + step) % WORLD
        # A compare-and-swap that changes nothing: Triton's plain loads don't acquire.
        seen = tl.atomic_cas(flags + peer, call, call, sem="acquire", scope="sys")
        while (seen != call) & (polls < max_polls):
            seen = tl.atomic_cas(flags + peer, call, call, sem="acquire", scope="sys")
            polls += 1
        if seen != call:
            tl.store(status_ptr, peer + 1)
            lost = float("nan")
    tl.debug_barrier()
    return lost


# One binary for any number of rows: a graph may be captured with a number not seen before.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "max_polls"]
)
def add_rms_norm_kernel(  # noqa: PLR0917 - as above
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    calls_ptr: tl.tensor,
    status_ptr: tl.tensor,
    num_rows: tl.tensor,
    row_size: tl.tensor,
    eps: tl.tensor,
    max_polls: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    REGION: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """residual += sum of x over the ranks; normed = norm(residual) * weight. Grid: <= PROGRAMS.

    x, residual, normed: (num_rows, row_size), contiguous, of one dtype; weight (row_size,).
    bases: (WORLD,) int64, the address on each rank of (2, PROGRAMS, WORLD, REGION) elements of the
    dtype; FLAGS_AT bytes behind it stand (2, PROGRAMS, WORLD) int32. calls: (PROGRAMS,) int32,
    status: (1,) int32.
    """
    dtype = x_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < row_size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    row, row_here = tl.program_id(0), 0
    call = tl.load(calls_ptr + row) + 1
    # Of the WORLD regions and flags of this program and half, the first.
    first = ((call & 1) * PROGRAMS + row) * WORLD
    _push(x_ptr, bases_ptr, first, call, num_rows, row_size, RANK, WORLD, REGION, FLAGS_AT, BLOCK)
    own = tl.load(bases_ptr + RANK)
    flags = (own + FLAGS_AT).to(tl.pointer_type(tl.int32)) + first
    lost = _await_peers(flags, call, max_polls, status_ptr, RANK, WORLD)
    came = tl.multiple_of(own.to(tl.pointer_type(dtype)), 16) + first * REGION
    while row < num_rows:
        at = row * row_size + columns
        total = tl.zeros([BLOCK], dtype=tl.float32) + lost
        for rank in tl.static_range(WORLD):
            if rank == RANK:
                part = tl.load(x_ptr + at, mask=inside, other=0.0)
            else:
                part_ptr = came + rank * REGION + row_here * row_size + columns
                part = tl.load(part_ptr, mask=inside, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        # Rounded where the operations one by one would round.
        added = (residual.to(tl.float32) + total.to(dtype).to(tl.float32)).to(dtype)
        tl.store(residual_ptr + at, added, mask=inside)
        wide = tl.where(inside, added.to(tl.float32), 0.0)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / row_size + eps)
        normed = (wide * scale).to(dtype).to(tl.float32) * weight
        tl.store(normed_ptr + at, normed.to(dtype), mask=inside)
        row += tl.num_programs(0)
        row_here += 1
    tl.store(calls_ptr + tl.program_id(0), call)
