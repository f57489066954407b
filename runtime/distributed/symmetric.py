"""Sums over GPUs that write and read each other's memory; NCCL for what is too large for that.

The memory of one group, the same on every rank:

    input    INPUT_BYTES; what the one-shot and two-shot operations of torch sum up
    regions  what the ranks push to each other in the fused kernel (`symmetric_kernels`), its flags

Why one input is enough. The operations of torch put a barrier of all ranks before the first read
and one after the last: block b of a rank leaves when block b of every peer has read what it reads.
So when the kernel has ended here, nobody reads this rank's input any more, and the next kernel on
the stream (a product that writes to `input_buffer`, or our copy) may overwrite it. The first
barrier comes after that kernel on every rank, so nobody reads too early. Both write their result
into memory of its own. torch's variant that copies in by itself is not used: it signals its peers
before all threads of its block have written.

All calls of a rank come on one stream, or on streams that wait for each other; all ranks make the
same calls. No call waits for the CPU, so all of them can be captured in CUDA graphs. A kernel whose
peer died spins until its process is ended.

The end, in this order: release the graphs, synchronise the device, `close`, destroy the process
groups. A group destroyed under a live graph can hang. No peer has to be awaited: memory that one
rank gives back stays mapped where others still use it.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory

from vcli.runtime.distributed.group import GroupHandle

INPUT_BYTES: Final = 16 << 20
#: Programs of the fused kernel. They wait for each other, so all must run at once: the smallest
#: GPU that is worth it has more multiprocessors.
PROGRAMS: Final = 96
#: What a program can push to one peer: 3 rows of 8192 16-bit numbers, so 256 rows in all.
REGION_BYTES: Final = 48 << 10
MAX_ROW: Final = 16384
_FLAG_BYTES: Final = 4
#: torch's operations know these; the fused kernel also float16.
_SUMMED_DTYPES: Final = (torch.bfloat16, torch.float32)
_FUSED_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
#: Looks at a flag, of about half a microsecond: seconds while a group is tried, ...
TRIAL_POLLS: Final = 4_000_000
#: ... then longer than any deadline of the host.
SERVICE_POLLS: Final = 2**31 - 1


class PeerMemoryError(RuntimeError):
    """The GPUs of a group can't share memory; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceLimits:
    """The largest payload in bytes that each way takes; what is above all of them goes by NCCL.

    One-shot comes first, two-shot where that ends; `fused_norm` counts in calls of `add_rms_norm`.
    """

    one_shot: int = 0
    two_shot: int = 0
    fused_norm: int = 0


def regions_bytes(world: int) -> int:
    """Bytes of the regions of all programs; the flags stand behind them."""
    return 2 * PROGRAMS * world * REGION_BYTES


def total_bytes(world: int) -> int:
    """Bytes that a rank gives to a group of `world`."""
    return INPUT_BYTES + regions_bytes(world) + 2 * PROGRAMS * world * _FLAG_BYTES


def fits_regions(num_rows: int, row_size: int, item_bytes: int) -> bool:
    """Whether the fused kernel can take so many rows: each program gets an equal share of them."""
    if not 0 < row_size <= MAX_ROW or num_rows < 1:
        return False
    rows_here = -(-num_rows // min(num_rows, PROGRAMS))
    return rows_here * row_size * item_bytes <= REGION_BYTES


class PeerMemory:
    """This rank's memory for a group, and after `meet` that of its peers."""

    def __init__(self, world: int, device: torch.device) -> None:
        """Allocates; no other rank is needed.

        Raises:
            PeerMemoryError: this GPU can't, or torch would do what it must not.
        """
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        if processors < PROGRAMS:
            raise PeerMemoryError(f"{device} has {processors} multiprocessors, of {PROGRAMS}")
        # `rendezvous` makes a multicast object by itself where this says yes, and that can put the
        # GPUs of a host out of service where its fabric is not set up for it.
        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
            raise PeerMemoryError(
                "torch would make an NVLink multicast object; "
                "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 keeps it from that"
            )
        if symm_mem.get_backend(device) != "CUDA":
            symm_mem.set_backend("CUDA")
        # Not `symm_mem.empty`, whose memory pool may put several tensors into one allocation.
        num_bytes = total_bytes(world)
        self.own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self.own.zero_()
        torch.cuda.synchronize(device)
        self._handle: _SymmetricMemory | None = None

    def meet(self, group: GroupHandle) -> None:
        """Maps the memory of all ranks; every rank of `group` calls it."""
        assert group.device_group is not None
        self._handle = symm_mem.rendezvous(self.own, group.device_group)

    def of_rank(self, rank_in_group: int) -> torch.Tensor:
        """All bytes of a rank's memory."""
        assert self._handle is not None
        return self._handle.get_buffer(rank_in_group, (self.own.numel(),), torch.uint8)

    def addresses(self) -> list[int]:
        """Where the memory of each rank begins here."""
        assert self._handle is not None
        return list(map(int, self._handle.buffer_ptrs))

    def close(self) -> None:
        """Gives it back; nothing may be running that uses it."""
        self._handle = None
        self.own = torch.empty(0)


class SymmetricCommunicator:
    """The communicator of one TP group on one node; `limits` decides what goes which way."""

    name = "symmetric memory"

    def __init__(self, group: GroupHandle, memory: PeerMemory, device: torch.device) -> None:
        """`group` has both channels; `memory` has met its peers."""
        assert group.device_group is not None
        self.limits = AllReduceLimits()
        self.max_polls = TRIAL_POLLS
        self._group = group
        self._memory = memory
        self._group_name = group.device_group.group_name
        self._input_address = memory.addresses()[group.rank_in_group]
        bases = [address + INPUT_BYTES for address in memory.addresses()]
        self._bases = torch.tensor(bases, dtype=torch.int64, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self._status = torch.zeros(1, dtype=torch.int32, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; by NCCL it is written into `tensor`."""
        num_bytes = tensor.nbytes
        if self._can_sum(tensor.dtype, num_bytes, tensor.device) and tensor.is_contiguous():
            if num_bytes <= self.limits.one_shot:
                return self.one_shot(tensor)
            if num_bytes <= self.limits.two_shot:
                return self.two_shot(tensor)
        dist.all_reduce(tensor, group=self._channel(tensor))
        return tensor

    def input_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Where the next one-shot or two-shot sum reads; to be summed before the next is asked for.

        None where it would not be read from there: NCCL and the fused kernel take any memory.
        """
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        is_fused = len(shape) == 2 and self._can_fuse(shape[0], shape[1], dtype)
        largest = max(self.limits.one_shot, self.limits.two_shot)
        if is_fused or num_bytes > largest or not self._can_sum(dtype, num_bytes, self._device):
            return None
        return self._view(shape, dtype)

    def add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The weighted norm of residual + the sum over all ranks, and that, written to `residual`.

        (T, D) each. The sum is taken in float32 in rank order, so all ranks get the same bits.
        None where one kernel can't do it, or is not faster.
        """
        if tensor.dim() != 2 or not self._can_fuse(len(tensor), tensor.shape[1], tensor.dtype):
            return None
        alike = (tensor, residual, weight)
        if any(part.dtype is not tensor.dtype or not part.is_contiguous() for part in alike):
            return None
        return self.fused_norm(tensor, residual, weight, eps), residual

    def one_shot(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank reads all inputs."""
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(
            self._staged(tensor), "sum", self._group_name
        )
        return summed

    def two_shot(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank sums a part, then reads the parts of the others; the input is overwritten."""
        summed: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(
            self._staged(tensor), "sum", self._group_name, torch.empty_like(tensor)
        )
        return summed

    def nccl(self, tensor: torch.Tensor) -> torch.Tensor:
        """By NCCL, in place."""
        dist.all_reduce(tensor, group=self._group.device_group)
        return tensor

    def fused_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """`add_rms_norm` without asking whether it can."""
        from vcli.runtime.distributed.symmetric_kernels import add_rms_norm_kernel

        normed = torch.empty_like(x)
        grid = (min(x.shape[0], PROGRAMS),)
        add_rms_norm_kernel[grid](
            *self._kernel_arguments(x, residual, weight, normed, eps), **self._constants(x)
        )
        return normed

    def compile_fused_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> None:
        """Compiles the kernel for rows like these, without a launch."""
        from vcli.runtime.distributed.symmetric_kernels import add_rms_norm_kernel

        add_rms_norm_kernel.warmup(
            *self._kernel_arguments(x, residual, weight, x, 1e-6),
            grid=(1,),
            **self._constants(x),
        )

    def lost_peer(self) -> int | None:
        """The rank in the group for which a fused kernel gave up; waits for the device."""
        status = int(self._status.item())
        return status - 1 if status else None

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of all ranks along `dim`; by NCCL, or gloo for those of the CPU."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self._group.size)]
        dist.all_gather(parts, tensor, group=self._channel(tensor))
        return torch.cat(parts, dim=dim)

    def send(self, tensor: torch.Tensor, dst_rank_in_group: int) -> None:
        """By NCCL or gloo."""
        dist.send(tensor, self._group.ranks[dst_rank_in_group], group=self._channel(tensor))

    def recv(self, buffer: torch.Tensor, src_rank_in_group: int) -> None:
        """By NCCL or gloo."""
        dist.recv(buffer, self._group.ranks[src_rank_in_group], group=self._channel(buffer))

    def close(self) -> None:
        """Gives the memory back; graphs that use it are released and the device is idle."""
        self.limits = AllReduceLimits()
        self._memory.close()

    @property
    def _device(self) -> torch.device:
        return self._bases.device

    def _can_sum(self, dtype: torch.dtype, num_bytes: int, device: torch.device) -> bool:
        # The operations read 16 bytes at a time.
        is_even = 0 < num_bytes <= INPUT_BYTES and num_bytes % 16 == 0
        return is_even and dtype in _SUMMED_DTYPES and device == self._device

    def _can_fuse(self, num_rows: int, row_size: int, dtype: torch.dtype) -> bool:
        is_small = num_rows * row_size * dtype.itemsize <= self.limits.fused_norm
        fits = is_small and fits_regions(num_rows, row_size, dtype.itemsize)
        return fits and dtype in _FUSED_DTYPES

    def _view(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.own[:INPUT_BYTES].view(dtype)[: torch.Size(shape).numel()].view(shape)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        staged = self._view(tuple(tensor.shape), tensor.dtype)
        if tensor.data_ptr() != self._input_address:
            staged.copy_(tensor)
        return staged

    def _kernel_arguments(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        normed: torch.Tensor,
        eps: float,
    ) -> tuple[Any, ...]:
        return (
            x, residual, weight, normed, self._bases, self._calls, self._status,
            x.shape[0], x.shape[1], eps, self.max_polls,
        )  # fmt: skip

    def _constants(self, x: torch.Tensor) -> dict[str, int]:
        block = max(1 << (x.shape[1] - 1).bit_length(), 128)
        return {
            "RANK": self._group.rank_in_group,
            "WORLD": self._group.size,
            "PROGRAMS": PROGRAMS,
            "REGION": REGION_BYTES // x.element_size(),
            "FLAGS_AT": regions_bytes(self._group.size),
            "BLOCK": block,
            # 16 bytes of 16-bit numbers for each thread.
            "num_warps": min(max(block // 256, 4), 16),
        }

    def _channel(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        group = self._group
        channel = group.cpu_group if tensor.device.type == "cpu" else group.device_group
        assert channel is not None
        return channel
