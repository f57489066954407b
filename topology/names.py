"""Names that people see in `ps`, in logs and in /proc/PID/fd."""

from typing import Final

TITLE_PREFIX: Final = "vcli::"
#: The process that the user starts, without prefix.
API_SERVER: Final = "ApiServer"


def titled(base: str, *parts: tuple[str, int, int]) -> str:
    """`vcli::BASE_AXISi...`; a part is (axis, index, size) and shows only when its size > 1."""
    shown = "".join(f"_{axis}{index}" for axis, index, size in parts if size > 1)
    return f"{TITLE_PREFIX}{base}{shown}"


def engine_core_title(dp_rank: int, dp_size: int) -> str:
    """Title of the engine core of one replica."""
    return titled("EngineCore", ("DP", dp_rank, dp_size))


def memfd_name(purpose: str, *, dp_rank: int, rank: int | None = None) -> str:
    """Name of a memory file as /proc/PID/fd shows it: `vcli-broadcast-dp0`, `vcli-reply-dp0-r3`."""
    suffix = "" if rank is None else f"-r{rank}"
    return f"vcli-{purpose}-dp{dp_rank}{suffix}"
