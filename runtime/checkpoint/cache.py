"""The cache of converted models: where it lies, its lock, and how a folder appears in it whole.

    models/NAME                   complete, or absent: it appears by one rename
    models/.NAME.lock             flock; holds "pid N on HOST" of the last holder, never unlinked
    models/.NAME.kept/            what survives a kill for the next attempt (a finished download)
    models/.NAME.building-XXXX/   work of one attempt

Whoever holds the lock owns every `.NAME.*` entry, so a leftover found under the lock belongs to a
dead process. The kernel drops the lock with its holder, SIGKILL included.
"""

import errno
import fcntl
import os
import pwd
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vcli.topology.errors import UnfitError, VcliError

LOCK_POLL_S = 0.1
LOCK_REMINDER_S = 15.0

Report = Callable[[str], None]


def user_home(environ: Mapping[str, str]) -> Path:
    """The home folder that `environ` names, else the one of the password database."""
    home = environ.get("HOME", "")
    if home:
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise UnfitError(
            f"HOME is not set and uid {os.getuid()} has no home folder: no place for the cache",
            hint="set VCLI_HOME to a folder that you can write to",
        ) from None


def models_folder(environ: Mapping[str, str]) -> Path:
    """Where converted models are kept; it need not exist.

    VCLI_HOME, else XDG_CACHE_HOME (ignored when relative, as XDG demands), else ~/.cache.
    """
    vcli_home = environ.get("VCLI_HOME", "")
    if vcli_home:
        return Path(vcli_home).absolute() / "cache" / "models"
    xdg_cache = Path(environ.get("XDG_CACHE_HOME", ""))
    root = xdg_cache if xdg_cache.is_absolute() else user_home(environ) / ".cache"
    return root / "vcli" / "models"


def ensure_cached(
    target: Path,
    *,
    title: str,
    needed_bytes: int,
    build: Callable[[Path, Path], None],
    report: Report,
) -> Path:
    """`target` itself, made first by `build(building, kept)` if it is not there.

    `building` is an empty folder that becomes `target`; `kept` is a path beside it, of which
    `build` may make a folder that the next attempt finds again and that success removes.
    Of several processes one builds, the others wait and use the result.

    Raises:
        UnfitError: the cache cannot be written, or the disk is full.
    """
    try:
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, title=title, report=report):
            if not target.is_dir():
                _build_and_publish(target, title=title, needed_bytes=needed_bytes, build=build)
    except VcliError:
        raise
    except OSError as error:
        raise _unfit_cache(error, target.parent, title, needed_bytes) from error
    return target


@contextmanager
def _lock(target: Path, *, title: str, report: Report) -> Iterator[None]:
    lock_path = target.with_name(f".{target.name}.lock")
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for_lock(descriptor, title=title, report=report)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, *, title: str, report: Report) -> None:
    """Polls without a deadline: the kernel frees the lock when its holder dies."""
    next_report_s, has_waited = 0.0, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            # Who has just got it has yet to write its name.
            if time.monotonic() >= next_report_s and (holder or has_waited):
                report(f"waiting for {holder or 'another process'}, which prepares {title}")
                next_report_s = time.monotonic() + LOCK_REMINDER_S
            time.sleep(LOCK_POLL_S)
            has_waited = True
        else:
            return


def _build_and_publish(
    target: Path, *, title: str, needed_bytes: int, build: Callable[[Path, Path], None]
) -> None:
    kept = target.with_name(f".{target.name}.kept")
    building_prefix = f".{target.name}.building-"
    for entry in target.parent.iterdir():
        if entry.name.startswith(building_prefix):
            shutil.rmtree(entry, ignore_errors=True)
    _require_free_bytes(target.parent, title=title, needed_bytes=needed_bytes)
    building = Path(tempfile.mkdtemp(prefix=building_prefix, dir=target.parent))
    try:
        # mkdtemp makes it private; other users of a shared cache need the ordinary mode.
        building.chmod(0o755)
        build(building, kept)
        for path in [*building.rglob("*"), building]:
            _flush_to_disk(path)
        # Before the rename: nobody comes here again once `target` exists.
        shutil.rmtree(kept, ignore_errors=True)
        building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    _flush_to_disk(target.parent)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_free_bytes(folder: Path, *, title: str, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UnfitError(
            f"{title} needs {needed_bytes:,} bytes below {folder}, {free_bytes:,} are free",
            hint="free some space, or set VCLI_HOME to a folder on another disk",
        )


def _unfit_cache(error: OSError, folder: Path, title: str, needed_bytes: int) -> UnfitError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnfitError(
            f"the disk of {folder} filled up while {title} was prepared; "
            f"it needs {needed_bytes:,} bytes",
            hint="free some space, or set VCLI_HOME to a folder on another disk",
        )
    return UnfitError(
        f"cannot prepare {title} in the cache {folder}: {error.strerror or error}"
        + (f" ({error.filename})" if error.filename else ""),
        hint="set VCLI_HOME to a folder that you can write to",
    )
