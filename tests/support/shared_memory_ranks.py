"""Stands in for the memory of GPUs: bytes that several processes map, each at its own address."""

import mmap
import os

import torch

from vcli.runtime.distributed.symmetric import total_bytes


class FileMemory:
    """`PeerMemory` of rank `rank_in_group` over one file for all ranks of a group."""

    def __init__(self, path: str, rank_in_group: int, world: int) -> None:
        size = total_bytes(world)
        descriptor = os.open(path, os.O_RDWR)
        os.ftruncate(descriptor, size * world)
        self._all = torch.frombuffer(mmap.mmap(descriptor, size * world), dtype=torch.uint8)
        os.close(descriptor)
        self._size = size
        self.own = self.of_rank(rank_in_group)

    def of_rank(self, rank_in_group: int) -> torch.Tensor:
        return self._all[rank_in_group * self._size : (rank_in_group + 1) * self._size]

    def addresses(self) -> list[int]:
        return [self._all.data_ptr() + start for start in range(0, self._all.numel(), self._size)]

    def close(self) -> None:
        self.own = torch.empty(0)
