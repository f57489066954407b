"""The folders that caches and temporary files go to, and the file systems they lie on."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vcli.diagnostics.files import HostFiles

#: File systems that several nodes may share.
NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "lustre", "beegfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs",
     "gpfs", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs", "wekafs", "panfs", "orangefs",
     "fuse.gcsfuse", "fuse.s3fs", "fuse.juicefs", "efs")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder:
    """A folder, the variable that moves it, and whether vcli must be able to write there."""

    path: str
    variable: str
    is_needed: bool
    is_compile_cache: bool = False


def cache_folders(environ: Mapping[str, str], *, is_cuda: bool) -> tuple[CacheFolder, ...]:
    """Where vcli and the libraries below it keep files; compile caches only with GPUs."""
    home = environ.get("HOME") or str(Path.home())
    cache = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    temporary = environ.get("TMPDIR") or "/tmp"
    own = f"{environ['VCLI_HOME']}/cache" if environ.get("VCLI_HOME") else f"{cache}/vcli"
    folders = [
        CacheFolder(path=own, variable="VCLI_HOME", is_needed=True),
        CacheFolder(path=temporary, variable="TMPDIR", is_needed=True),
        CacheFolder(
            path=environ.get("HF_HOME") or f"{cache}/huggingface",
            variable="HF_HOME",
            is_needed=False,
        ),
    ]
    if is_cuda:
        user = environ.get("USER") or str(os.getuid())
        folders += [
            CacheFolder(
                path=environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache",
                variable="TRITON_CACHE_DIR",
                is_needed=True,
                is_compile_cache=True,
            ),
            CacheFolder(
                path=environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{temporary}/torchinductor_{user}",
                variable="TORCHINDUCTOR_CACHE_DIR",
                is_needed=True,
                is_compile_cache=True,
            ),
        ]
    return tuple(folders)


def existing_parent(files: HostFiles, folder: str) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    path = files.path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def file_system_of(files: HostFiles, folder: str) -> str:
    """Type of the file system that the folder lies (or would lie) on, by /proc/self/mountinfo."""
    best, kind = "", ""
    for line in (files.read("/proc/self/mountinfo") or "").splitlines():
        words = line.split()
        if "-" not in words:
            continue
        point = words[4].replace("\\040", " ")
        is_above = folder == point or folder.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):
            best, kind = point, words[words.index("-") + 1]
    return kind
