"""Objects from one rank of a group to the others through shared memory, where they share a machine.

A ring for each source, made the first time that it sends: the torch group carries only the address
under which the others fetch its descriptors.
"""

import os
import socket
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.codec import decode, encode
from vcli.runtime.ipc.passing import HandleOffer, fetch_reader_handle

RING_BYTES: Final = 4 << 20


class ObjectRing:
    """The object channel of one group; every rank makes the same calls in the same order.

    `timeout_s` is the longest wait for a peer.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank_in_group: int, cpu_group: ProcessGroup, timeout_s: float
    ) -> None:
        self._ranks = ranks
        self._rank_in_group = rank_in_group
        self._cpu_group = cpu_group
        self._timeout_s = timeout_s
        self._is_local: bool | None = None
        self._writer: BroadcastWriter | None = None
        self._readers: dict[int, BroadcastReader] = {}

    @property
    def is_local(self) -> bool:
        """Whether all ranks share a machine; the first look is a collective."""
        if self._is_local is None:
            places: list[Any] = [None] * len(self._ranks)
            dist.all_gather_object(places, _place(), group=self._cpu_group)
            self._is_local = len(set(places)) == 1
        return self._is_local

    def broadcast(self, obj: Any, src_rank_in_group: int) -> Any:
        """The source's `obj`, on every rank.

        Raises:
            QueueTimeout: a rank did not come in time; the source's error names who is behind.
            PeerDiedError: a rank is dead.
        """
        if self._rank_in_group == src_rank_in_group:
            if self._writer is None:
                self._writer = self._make_ring()
            self._writer.send(encode(obj), self._timeout_s)
            return obj
        reader = self._readers.get(src_rank_in_group)
        if reader is None:
            reader = self._readers[src_rank_in_group] = self._join_ring(src_rank_in_group)
        received = decode(reader.recv(self._timeout_s))
        reader.release()
        return received

    def close(self) -> None:
        """Give the rings back; may be called again."""
        if self._writer is not None:
            self._writer.close()
        for reader in self._readers.values():
            reader.close()

    def _make_ring(self) -> BroadcastWriter:
        source = self._ranks[self._rank_in_group]
        writer = BroadcastWriter.create(len(self._ranks) - 1, RING_BYTES, f"objects-r{source}")
        handles = [writer.reader_handle(index) for index in range(writer.num_readers)]
        offer = HandleOffer(handles)
        try:
            dist.broadcast_object_list([offer.address], src=source, group=self._cpu_group)
            offer.serve(self._timeout_s)
        finally:
            offer.close()
        return writer

    def _join_ring(self, src_rank_in_group: int) -> BroadcastReader:
        address: list[Any] = [None]
        source = self._ranks[src_rank_in_group]
        dist.broadcast_object_list(address, src=source, group=self._cpu_group)
        # The source has no reader's place in its own ring.
        index = self._rank_in_group - (self._rank_in_group > src_rank_in_group)
        return BroadcastReader.attach(fetch_reader_handle(address[0], index, self._timeout_s))


def _place() -> tuple[str, str, int]:
    """What processes share that can reach each other's abstract sockets: boot, network, user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return host, str(Path("/proc/self/ns/net").readlink()), os.getuid()
