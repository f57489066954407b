"""Asks the kernel to read this rank's weights while the rank joins its groups."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from vcli.runtime.checkpoint.safetensors_file import TensorEntry, read_header
from vcli.runtime.config import EngineConfig
from vcli.runtime.log import get_logger
from vcli.runtime.models.loader import layer_of, weight_files
from vcli.runtime.worker.memory import free_host_bytes
from vcli.topology.errors import VcliError
from vcli.topology.plan import RankPlan

logger = get_logger(__name__)

#: Ranges that are so near to each other are asked for together.
_GAP_BYTES = 1 << 20

#: Of one request the kernel reads no more than the device's read-ahead, often 128 KiB.
_STEP_BYTES = 128 << 10


def start_prefetch(config: EngineConfig, plan: RankPlan) -> threading.Thread | None:
    """Read ahead in a thread, which ends by itself; None where no weights will be read.

    The ranks of one pipeline stage need about the same pages, so each of them asks for a share.
    What is wrong with the files is left to the loader to say.
    """
    if config.model.load_format != "safetensors":
        return None
    peers = [
        rank.rank
        for rank in config.plan.local_ranks(plan.node_rank)
        if (rank.dp_rank, rank.pp_rank) == (plan.dp_rank, plan.pp_rank)
    ]
    share = (peers.index(plan.rank), len(peers))
    thread = threading.Thread(
        target=_read_ahead,
        args=(config.model.path, plan.layer_span, share),
        name="weights-ahead",
        daemon=True,
    )
    thread.start()
    return thread


def ranges_ahead(
    path: Path, layer_span: tuple[int, int] | None, share: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Offset and length of what rank `share[0]` of `share[1]` asks for in a safetensors file.

    Raises:
        ConfigError: it is no such file.
    """
    entries = [entry for entry in read_header(path) if _is_wanted(entry, layer_span)]
    data_bytes = max((entry.end_bytes for entry in entries), default=0)
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    begin, end = 0, 0
    merged: list[tuple[int, int]] = []
    for entry in sorted(entries, key=lambda entry: entry.begin_bytes):
        if entry.begin_bytes - end > _GAP_BYTES:
            merged.append((begin, end))
            begin = entry.begin_bytes
        end = entry.end_bytes
    if data_bytes:
        merged.append((begin, end))
    index, count = share
    for begin, end in merged:
        first = begin + (end - begin) * index // count
        last = begin + (end - begin) * (index + 1) // count
        if last > first:
            yield start + first, last - first


def _read_ahead(folder: Path, layer_span: tuple[int, int] | None, share: tuple[int, int]) -> None:
    left = free_host_bytes() // 2
    with contextlib.suppress(VcliError, OSError):
        for path in weight_files(folder):
            with path.open("rb") as file:
                for offset, num_bytes in ranges_ahead(path, layer_span, share):
                    left -= num_bytes
                    if left < 0:
                        # What comes in last would push out what came in first.
                        return
                    _ask_for(file.fileno(), offset, num_bytes)


def _ask_for(descriptor: int, offset: int, num_bytes: int) -> None:
    for begin in range(offset, offset + num_bytes, _STEP_BYTES):
        length = min(_STEP_BYTES, offset + num_bytes - begin)
        os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_WILLNEED)


def _is_wanted(entry: TensorEntry, layer_span: tuple[int, int] | None) -> bool:
    layer = layer_of(entry.name)
    return layer is None or layer_span is None or layer_span[0] <= layer < layer_span[1]
