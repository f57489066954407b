"""PROC: how long a start will take."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, passed, skipped, warned
from vcli.diagnostics.checks.fit import NO_MODEL
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.text import MIB, size_text

#: `serve --start-timeout`, if it is left out.
START_TIMEOUT_S: Final = 600.0
_SAMPLE_BYTES: Final = 64 * MIB
_DEEP_SAMPLE_BYTES: Final = 512 * MIB
_CHUNK_BYTES: Final = 4 * MIB
_SAMPLE_S: Final = 0.7
_DEEP_SAMPLE_S: Final = 5.0
_IMPORT_DEADLINE_S: Final = 40.0


@check(
    "PROC-06",
    "time that a start takes",
    level=Level.L1,
    why="serve gives up when its ranks are not ready in time",
    expected="less than serve's --start-timeout, 600 s if it is left out",
    remedy=Remedy(
        bare_metal="--start-timeout {timeout}, or copy the model to a local disk: {folder}"
    ),
    deadline_s=_IMPORT_DEADLINE_S + _DEEP_SAMPLE_S + 5,
    is_headline=True,
)
def start_estimate(context: CheckContext) -> Finding:
    """Divides the bytes of the weight files by the speed of a sample that is read from them.

    What the page cache holds is read fast, as the start would. With `--deep` the sample is larger,
    and a child imports torch to see how long that takes: once for a fork server, once for each
    rank with spawn, where ranks share the CPUs.
    """
    import_s = _import_seconds(context) if context.is_deep else None
    parts = [] if import_s is None else [f"import of torch {import_s:.1f} s"]
    total_s = import_s or 0.0
    files = _weight_files(context)
    if files:
        size = sum(path.stat().st_size for path in files)
        speed = _read_speed(context, max(files, key=lambda path: path.stat().st_size))
        total_s += size / speed
        parts.append(f"{size_text(size)} of weights at {size_text(speed)}/s")
    elif not parts:
        return skipped(NO_MODEL if context.model is None else "no weight files on this machine")
    text = f"loading takes about {max(1, round(total_s))} s: {', '.join(parts)}"
    if total_s > START_TIMEOUT_S:
        folder = files[0].parent if files else "-"
        return warned(text, values={"timeout": int(total_s * 1.5), "folder": folder})
    return passed(text)


def _weight_files(context: CheckContext) -> Sequence[Path]:
    folder = context.model.folder if context.model else None
    return sorted(folder.glob("*.safetensors")) if folder is not None else ()


def _read_speed(context: CheckContext, path: Path) -> float:
    """Bytes per second of a sample of the file."""
    limit = _DEEP_SAMPLE_BYTES if context.is_deep else _SAMPLE_BYTES
    limit_s = _DEEP_SAMPLE_S if context.is_deep else _SAMPLE_S
    begin, count = context.clock(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while count < limit and (not count or context.clock() - begin < limit_s):
                part = file.read(_CHUNK_BYTES)
                if not part:
                    break
                count += len(part)
    except OSError as error:
        raise CannotMeasureError(f"{path} cannot be read: {error.strerror}") from error
    if not count:
        raise CannotMeasureError(f"{path} is empty")
    return count / max(1e-6, context.clock() - begin)


def _import_seconds(context: CheckContext) -> float | None:
    """Seconds of one import of torch, for as many ranks as do it at once; None without torch."""
    if context.packages.version("torch") is None:
        return None
    begin = context.clock()
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", "import torch"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotMeasureError(f"torch cannot be imported: {error}") from error
    seconds = context.clock() - begin
    if context.plan.start_method.value != "spawn":
        return seconds
    return seconds * max(1.0, len(context.local_ranks) / max(1, len(context.affinity())))


CHECKS = (start_estimate,)
