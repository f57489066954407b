"""The cache folder, its lock and the atomic appearance of a folder in it."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from vcli.runtime.checkpoint.cache import ensure_cached, models_folder
from vcli.topology.errors import UnfitError


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"VCLI_HOME": "/v", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/v/cache/models"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/vcli/models"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/vcli/models"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/vcli/models"),
    ],
)
def test_cache_follows_vcli_home_then_xdg(environ: dict[str, str], expected: str) -> None:
    assert models_folder(environ) == Path(expected)


def _ensure(target: Path, build, *, needed_bytes: int = 0) -> Path:
    return ensure_cached(
        target, title="the thing", needed_bytes=needed_bytes, build=build, report=print
    )


def _fill(building: Path, kept: Path) -> None:
    del kept
    (building / "sub").mkdir()
    (building / "sub" / "file").write_text("x")


def test_folder_is_built_once(tmp_path: Path) -> None:
    target = tmp_path / "models" / "a"
    _ensure(target, _fill)
    _ensure(target, lambda building, kept: pytest.fail("built twice"))
    assert (target / "sub" / "file").read_text() == "x"
    assert _names(target.parent) == [".a.lock", "a"]


def test_folder_appears_by_one_rename(tmp_path: Path) -> None:
    seen: list[int] = []

    def build(building: Path, kept: Path) -> None:
        _fill(building, kept)
        assert not (tmp_path / "a").exists()
        seen.append(building.stat().st_ino)

    _ensure(tmp_path / "a", build)
    assert seen == [(tmp_path / "a").stat().st_ino]


def test_leftovers_of_dead_processes_are_swept_and_kept_files_are_found(tmp_path: Path) -> None:
    target = tmp_path / "a[1]"
    stale = tmp_path / ".a[1].building-dead"
    stale.mkdir()
    (tmp_path / ".a[1].kept").mkdir()
    (tmp_path / ".a[1].kept" / "download").write_text("finished")
    other = tmp_path / ".b.building-live"
    other.mkdir()

    def build(building: Path, kept: Path) -> None:
        assert not stale.exists()
        (building / "copy").write_text((kept / "download").read_text())

    _ensure(target, build)
    assert (target / "copy").read_text() == "finished"
    assert _names(tmp_path) == [".a[1].lock", ".b.building-live", "a[1]"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_failed_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def build(building: Path, kept: Path) -> None:
        _fill(building, kept)
        raise error

    with pytest.raises(error):
        _ensure(tmp_path / "a", build)
    assert _names(tmp_path) == [".a.lock"]


def test_too_little_space_is_told_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match=r"needs 1,152,921,504,606,846,976 bytes"):
        _ensure(tmp_path / "a", lambda building, kept: pytest.fail("built"), needed_bytes=1 << 60)


def test_disk_that_fills_up_is_told_with_the_needed_bytes(tmp_path: Path) -> None:
    def build(building: Path, kept: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UnfitError, match=r"filled up .* needs 12,345 bytes"):
        _ensure(tmp_path / "a", build, needed_bytes=12_345)


def test_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnfitError, match=r"Not a directory|File exists") as caught:
        _ensure(tmp_path / "file" / "models" / "a", _fill)
    assert "VCLI_HOME" in caught.value.hint


HOLDER = """
import sys
from pathlib import Path
from vcli.runtime.checkpoint.cache import ensure_cached
def build(building, kept):
    print("building", flush=True)
    sys.stdin.read()
ensure_cached(Path(sys.argv[1]), title="x", needed_bytes=0, build=build, report=print)
"""


@pytest.mark.process
def test_waiter_names_the_holder_and_takes_over_when_it_is_killed(tmp_path: Path) -> None:
    target = tmp_path / "a"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"building\n"
        lines: list[str] = []

        def report(line: str) -> None:
            lines.append(line)
            holder.kill()

        ensure_cached(target, title="the thing", needed_bytes=0, build=_fill, report=report)
    assert len(lines) == 1
    assert lines[0].startswith(f"waiting for pid {holder.pid} on ")
    assert _names(tmp_path) == [".a.lock", "a"]
