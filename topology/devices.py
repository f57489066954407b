"""Which GPUs of a host a launch uses, and the three numbers that each of them has.

    physical   NVML's index, and the UUID: the same for everybody on the machine
    visible    position within the user's CUDA_VISIBLE_DEVICES; without it all are visible
    logical    position within what `--device-ids` chooses of the visible: a worker's cuda:i

`GpuFacts.index` is the logical number, everywhere.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from vcli.topology.errors import ConfigError, PlacementError, UnfitError
from vcli.topology.facts import GpuFacts, HostFacts, LinkFacts

CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_FLAG: Final = "--device-ids"
#: Values of CUDA_VISIBLE_DEVICES that hide every GPU.
_HIDING: Final = ("", "-1", "NoDevFiles", "none", "void")
_MIG_REASON: Final = (
    "a MIG slice cannot reach the memory of others, and NCCL refuses two ranks on one GPU"
)
#: Longest text of a user that a message repeats.
_MAX_SHOWN: Final = 60
_MAX_INDEX_DIGITS: Final = 6


def parse_device_ids(typed: str) -> tuple[str, ...]:
    """`0,2` or `GPU-8f3...` as a list of numbers and UUIDs; which GPUs they mean is open.

    Raises:
        ConfigError: an entry that is neither, the same one twice, or a MIG slice.
    """
    entries = tuple(entry.strip() for entry in typed.split(","))
    for entry in entries:
        if entry.upper().startswith("MIG-"):
            raise ConfigError(
                f"{_FLAG} {_short(entry)}: {_MIG_REASON}",
                hint=f"{_FLAG} takes whole GPUs; turn slicing off: sudo nvidia-smi -i 0 -mig 0",
            )
        if not (_is_index(entry) or entry.upper().startswith("GPU-")):
            raise ConfigError(
                f"{_FLAG} {_short(typed)}: {_short(entry)!r} is neither a number nor a UUID",
                hint=f"{_FLAG} 0,1 or {_FLAG} GPU-8f3a; nvidia-smi -L lists them",
            )
        if entries.count(entry) > 1:
            raise ConfigError(
                f"{_FLAG} {_short(typed)} names {_short(entry)} twice",
                hint=f"{_FLAG} {_short(','.join(dict.fromkeys(entries)))}",
            )
    return entries


def check_visible_devices(host: HostFacts, variable: str | None) -> None:
    """Whether each entry of the user's CUDA_VISIBLE_DEVICES means a GPU; `variable` is its value.

    CUDA stops at the first that does not, and shows fewer GPUs without a word.

    Raises:
        UnfitError: it hides all GPUs, or an entry is unknown, doubled, or a MIG slice.
    """
    if variable is None:
        return
    named = f"{CUDA_VISIBLE_DEVICES}={_short(variable)}"
    entries = [entry.strip() for entry in variable.split(",")]
    if entries[0] in _HIDING:
        raise UnfitError(
            f"{named} hides every GPU of {host.hostname}",
            hint=f"unset {CUDA_VISIBLE_DEVICES}, or --device cpu",
        )
    if "-1" in entries:
        # CUDA's mark for the end.
        entries = entries[: entries.index("-1")]
    sliced = next((entry for entry in entries if entry.upper().startswith("MIG-")), None)
    if sliced is not None:
        raise UnfitError(
            f"{named}: {_MIG_REASON}",
            hint=f"export {CUDA_VISIBLE_DEVICES} with whole GPUs; nvidia-smi -L lists them",
        )
    num_known = len(host.gpus)
    if num_known >= len(entries):
        return
    entry = entries[num_known]
    what = "comes twice" if entry in entries[:num_known] else "is unknown"
    raise UnfitError(
        f"{named}: {_short(entry) or 'an empty entry'} {what}, so CUDA shows {_count(num_known)} "
        f"of {len(entries)}",
        hint=f"export {CUDA_VISIBLE_DEVICES} without it; nvidia-smi -L lists the GPUs",
    )


def choose_devices(
    host: HostFacts,
    typed: str,
    *,
    variable: str | None = None,
    num_ranks: int | None = None,
) -> HostFacts:
    """The host with only those GPUs, numbered in the order of `typed` (`--device-ids`).

    Numbers count within the user's CUDA_VISIBLE_DEVICES (`variable`); `host` has what it shows.
    `num_ranks` is how many the node needs at least.

    Raises:
        ConfigError: an entry that means no GPU, more than one, or one that is chosen already.
        PlacementError: fewer GPUs than ranks.
    """
    entries = parse_device_ids(typed)
    shown = _count(len(host.gpus))
    if variable is not None:
        shown += f" in {CUDA_VISIBLE_DEVICES}={_short(variable)}"
    if not host.gpus:
        raise ConfigError(
            f"{_FLAG} {_short(typed)}: {host.hostname} shows no GPU",
            hint=f"leave out {_FLAG}, or look with vcli doctor cuda",
        )
    positions: list[int] = []
    for entry in entries:
        position = _position(entry, host, shown)
        if position in positions:
            other = entries[positions.index(position)]
            raise ConfigError(
                f"{_FLAG} {_short(typed)}: {_short(other)} and {_short(entry)} are the same GPU "
                f"({host.gpus[position].uuid})",
                hint="name it once",
            )
        positions.append(position)
    if num_ranks is not None and len(positions) < num_ranks:
        more = [place for place in range(len(host.gpus)) if place not in positions]
        enough = [*positions, *more][:num_ranks]
        raise PlacementError(
            f"{_FLAG} {_short(typed)} chooses {_count(len(positions))}, the {num_ranks} ranks on "
            f"this node need {num_ranks}; {host.hostname} shows {shown}",
            hint=f"{_FLAG} {','.join(map(str, enough))}"
            if len(enough) == num_ranks
            else f"--tensor-parallel-size {len(positions)}, or --nnodes for more machines",
        )
    gpus, links = renumbered(host.gpus, host.links, positions)
    return replace(host, gpus=gpus, links=links)


def composed_variable(host: HostFacts, variable: str | None = None) -> str:
    """CUDA_VISIBLE_DEVICES for the children: exactly the GPUs of `host`, in their order.

    UUIDs, which mean the same whatever else is set; where they are not known, the user's own
    entries, or NVML's numbers.
    """
    entries = [entry.strip() for entry in variable.split(",")] if variable else []
    values = []
    for gpu in host.gpus:
        visible = gpu.index if gpu.visible_index is None else gpu.visible_index
        known = entries[visible] if visible < len(entries) else None
        number = visible if gpu.physical_index is None else gpu.physical_index
        values.append(gpu.uuid or known or str(number))
    return ",".join(values)


def renumbered(
    gpus: Sequence[GpuFacts], links: Sequence[LinkFacts], positions: Sequence[int]
) -> tuple[tuple[GpuFacts, ...], tuple[LinkFacts, ...]]:
    """The GPUs at `positions`, numbered in that order, and the links between them."""
    new_of = {gpus[position].index: new for new, position in enumerate(positions)}
    return (
        tuple(replace(gpus[position], index=new) for new, position in enumerate(positions)),
        tuple(
            replace(link, first=new_of[link.first], second=new_of[link.second])
            for link in links
            if link.first in new_of and link.second in new_of
        ),
    )


def _position(entry: str, host: HostFacts, shown: str) -> int:
    if _is_index(entry):
        if int(entry) < len(host.gpus):
            return int(entry)
        raise ConfigError(
            f"{_FLAG} {entry}: {host.hostname} shows {shown}, numbered from 0 to "
            f"{len(host.gpus) - 1}",
            hint=f"{_FLAG} {','.join(str(gpu.index) for gpu in host.gpus[:8])}",
        )
    wanted = entry.lower()
    found = [
        position
        for position, gpu in enumerate(host.gpus)
        if gpu.uuid and gpu.uuid.lower().startswith(wanted)
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            f"{_FLAG} {_short(entry)}: no such UUID among {shown} of {host.hostname}",
            hint="nvidia-smi -L lists them",
        )
    raise ConfigError(
        f"{_FLAG} {_short(entry)} is the beginning of {len(found)} UUIDs: "
        + ", ".join(host.gpus[position].uuid for position in found[:4]),
        hint="type more of it",
    )


def _is_index(entry: str) -> bool:
    return entry.isascii() and entry.isdigit() and len(entry) <= _MAX_INDEX_DIGITS


def _count(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
