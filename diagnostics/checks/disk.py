"""HOST: room for caches and temporary files."""

import os
from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.folders import (
    NETWORK_FILE_SYSTEMS,
    CacheFolder,
    cache_folders,
    existing_parent,
    file_system_of,
)
from vcli.diagnostics.text import GIB, listing, size_text

MIN_FREE_BYTES: Final = 1 * GIB
GOOD_FREE_BYTES: Final = 10 * GIB


@check(
    "HOST-07",
    "room for caches and temporary files",
    why="a download or a compile that finds the disk full ends in the middle of a start",
    expected="10 GiB free (1 GiB at least) and the right to write",
    remedy=Remedy(
        bare_metal="free some space, or export {variable}=FOLDER on a disk that has room",
        docker="docker run -v /some/large/disk:/cache -e {variable}=/cache …",
        kubernetes="mount a volume with room, and set env {variable} to its path",
        slurm="export {variable}=$SCRATCH/…   in the job script",
    ),
    is_headline=True,
)
def room(context: CheckContext) -> Finding:
    """Looks at each folder that vcli and its libraries write to: free bytes and permission.

    These are vcli's own cache, TMPDIR and HF_HOME, with GPUs also the compile caches of Triton and
    torch. A folder that does not exist yet is judged by the nearest one above it. HF_HOME only
    warns: it is not written where the model is a local folder.
    """
    folders = cache_folders(context.environ, is_cuda=context.is_cuda)
    problems = [problem for folder in folders if (problem := _problem(context, folder))]
    if not problems:
        free = min(_free_bytes(context, folder) for folder in folders)
        return passed(f"{size_text(free)} free for caches")
    problems.sort(key=lambda problem: not problem[0])
    is_fatal = problems[0][0]
    return (failed if is_fatal else warned)(
        listing([text for _, text, _ in problems]), values={"variable": problems[0][2]}
    )


def _problem(context: CheckContext, folder: CacheFolder) -> tuple[bool, str, str] | None:
    """Whether it is fatal, what is wrong, and the variable that moves the folder."""
    parent = existing_parent(context.files, folder.path)
    name = f"{folder.path} ({folder.variable})"
    if not os.access(parent, os.W_OK | os.X_OK):
        return folder.is_needed, f"{name} cannot be written", folder.variable
    free = _free_bytes(context, folder)
    if free < MIN_FREE_BYTES:
        return folder.is_needed, f"{name} has {size_text(free)} free", folder.variable
    if free < GOOD_FREE_BYTES:
        return False, f"{name} has {size_text(free)} free", folder.variable
    return None


def _free_bytes(context: CheckContext, folder: CacheFolder) -> int:
    status = os.statvfs(existing_parent(context.files, folder.path))
    return status.f_bavail * status.f_frsize


@check(
    "HOST-08",
    "compile caches on a local disk",
    why="nodes that share a compile cache wait for each other's locks or read half-written files",
    expected="node-local folders for TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR",
    remedy=Remedy(
        bare_metal="export {variable}=/tmp/{name}-cache   on every node",
        docker="docker run -e {variable}=/tmp/{name}-cache …",
        kubernetes="env {variable}: /tmp/{name}-cache   on an emptyDir volume",
        slurm="export {variable}=${{SLURM_TMPDIR:-/tmp}}/{name}-cache   in the job script",
    ),
)
def shared_cache(context: CheckContext) -> Finding:
    """Looks up the file system of each compile cache in /proc/self/mountinfo.

    Warns where one lies on a network file system (NFS, Lustre, BeeGFS and the like).
    """
    folders = cache_folders(context.environ, is_cuda=True)
    found: list[tuple[str, str, str]] = []
    for folder in folders:
        kind = file_system_of(context.files, folder.path)
        if folder.is_compile_cache and kind in NETWORK_FILE_SYSTEMS:
            found.append((folder.path, kind, folder.variable))
    if not found:
        return passed("compile caches are node-local")
    first = found[0][2]
    return warned(
        listing([f"{path} ({variable}) is on {kind}" for path, kind, variable in found]),
        values={"variable": first, "name": first.split("_")[0].lower()},
    )


CHECKS = (room, shared_cache)
