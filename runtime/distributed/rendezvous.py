"""Joining the torch world through a store, with errors that name who did not come."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, not in its __all__
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from vcli.runtime.distributed.parallel_state import CommBackend
from vcli.runtime.log import get_logger
from vcli.topology.errors import ExitStatus, VcliError

logger = get_logger(__name__)

#: While ranks are missing, a line names them this often.
_NEWS_S = 5.0
_SHOWN_RANKS = 16


class JoinError(VcliError):
    """Ranks are missing at the deadline, or the store cannot be reached (exit 3)."""

    exit_status = ExitStatus.PEERS_MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousTarget:
    """Where the store is: `path` of a file on one node, or `host` and `port` of rank 0.

    The path is `/proc/PID/fd/N` of a memory file that its owner keeps open, so nothing is left on
    disk. `listen_fd` is rank 0's socket, already bound and listening: left to itself, torch
    listens on all interfaces.
    """

    path: str = ""
    host: str = ""
    port: int = 0
    listen_fd: int | None = None
    is_hosted: bool = False
    """The store at `host` belongs to whoever started the ranks; else rank 0 makes it."""
    prefix: str = ""
    """Put before every key."""

    def describe(self) -> str:
        """For errors: where the others should have come to."""
        return self.path or f"{self.host}:{self.port}"


def join_world(
    backend: CommBackend,
    rank: int,
    world_size: int,
    rendezvous: RendezvousTarget,
    *,
    timeout_s: float = 300.0,
) -> None:
    """Makes this process rank `rank` of the torch world; returns when all ranks are in.

    `timeout_s` bounds the wait for peers here, and is torch's default for later groups. A world
    of one needs no peers and makes nothing.

    Raises:
        JoinError: the deadline passed; names the ranks that had not come.
    """
    if world_size == 1:
        return
    deadline = time.monotonic() + timeout_s
    timeout = timedelta(seconds=timeout_s)
    store = _open_store(rendezvous, rank, world_size, timeout)
    meeting = _Meeting(store, rank, world_size, rendezvous.describe())
    # torch's own wait would say that a key did not come, not whose.
    meeting.wait_for_all(deadline, timeout_s)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise JoinError(
            f"rank {rank}: all {world_size} ranks met at {meeting.place}, but {backend} "
            f"could not connect them: {error}",
            hint="vcli doctor shows whether the ranks can reach each other",
        ) from error


@dataclass(frozen=True, slots=True)
class _Meeting:
    """One rank's wait for the others. Each rank that comes leaves a key in the store."""

    store: Store
    rank: int
    world_size: int
    place: str

    def wait_for_all(self, deadline: float, timeout_s: float) -> None:
        try:
            num_claims = self.store.add(_joined_key(self.rank), 1)
        except RuntimeError as error:
            raise self._lost(error) from error
        if num_claims != 1:
            raise _taken(self.rank, self.place)
        missing = list(range(self.world_size))
        while missing:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise JoinError(
                    f"rank {self.rank} waited {timeout_s:g} s at {self.place}: of "
                    f"{self.world_size} ranks, {len(missing)} had not joined: {_some(missing)}",
                    hint="look at the log of the missing ranks; they may have failed before",
                )
            missing = self._wait_for(missing, min(_NEWS_S, left_s))

    def _wait_for(self, ranks: list[int], wait_s: float) -> list[int]:
        """Those of `ranks` that are still missing after at most `wait_s`."""
        started = time.monotonic()
        try:
            self.store.wait([_joined_key(rank) for rank in ranks], timedelta(seconds=wait_s))
        except RuntimeError as error:
            # Each kind of store has its own error for "not yet": what counts is who is there.
            if time.monotonic() - started < wait_s / 2:
                raise self._lost(error) from error
        else:
            return []
        try:
            missing = [rank for rank in ranks if not self.store.check([_joined_key(rank)])]
        except RuntimeError as error:
            raise self._lost(error) from error
        if missing:
            logger.info("waiting for ranks %s of %d", _some(missing), self.world_size)
        return missing

    def _lost(self, error: RuntimeError) -> JoinError:
        return JoinError(
            f"rank {self.rank} lost the rendezvous store {self.place}: {error}",
            hint="rank 0, or the process that started it, has ended; look at its log",
        )


def _open_store(
    rendezvous: RendezvousTarget, rank: int, world_size: int, timeout: timedelta
) -> Store:
    try:
        if rendezvous.path:
            # torch would wait without a limit for a path that is gone or has become a pipe.
            if not Path(rendezvous.path).is_file():
                raise JoinError(
                    f"rank {rank} finds no rendezvous store at {rendezvous.path}",
                    hint="the process that started this rank has ended; look at its log",
                )
            return FileStore(rendezvous.path, world_size)
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            world_size,
            is_master=rank == 0 and not rendezvous.is_hosted,
            timeout=timeout,
            # The ranks are awaited by name, see `_Meeting`.
            wait_for_workers=False,
            master_listen_fd=rendezvous.listen_fd if rank == 0 else None,
        )
        return PrefixStore(rendezvous.prefix, store) if rendezvous.prefix else store
    except RuntimeError as error:
        raise JoinError(
            f"rank {rank} cannot open the rendezvous store {rendezvous.describe()}: {error}",
            hint="rank 0 and the process that started it must be alive and reachable",
        ) from error


def _taken(rank: int, place: str) -> JoinError:
    return JoinError(
        f"rank {rank} is taken: another process has joined at {place} as rank {rank}",
        hint="each process needs a rank of its own; look at how they were started",
    )


def _joined_key(rank: int) -> str:
    return f"vcli/joined/{rank}"


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    return f"{shown}, ..." if len(ranks) > _SHOWN_RANKS else shown
