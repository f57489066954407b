"""RAY: what Ray needs of this host, where it is used."""

import os
from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, passed, skipped, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.text import size_text

#: Part of the memory that Ray's object store takes by default, in /dev/shm.
OBJECT_STORE_PART: Final = 0.3


@check(
    "RAY-06",
    "room for Ray's object store",
    why="Ray falls back to a folder on disk, and every transfer becomes slow",
    expected="30 % of the memory free in /dev/shm",
    remedy=Remedy(
        bare_metal="sudo mount -o remount,size={size} /dev/shm   (or ray start "
        "--object-store-memory BYTES)",
        docker="docker run --shm-size={size} …",
        kubernetes="an emptyDir with medium: Memory and sizeLimit: {size}i at /dev/shm",
    ),
)
def object_store(context: CheckContext) -> Finding:
    """Compares /dev/shm with the memory of this host, where Ray is used.

    That is: Ray is the back end, or RAY_ADDRESS is set.
    """
    if context.plan.backend.value != "ray" and not context.environ.get("RAY_ADDRESS"):
        return skipped("Ray is not used")
    total = context.host.memory_total_bytes
    if total is None:
        return skipped("the system does not say how much memory it has")
    status = os.statvfs(context.files.path("/dev/shm"))
    free, need = status.f_bavail * status.f_frsize, int(OBJECT_STORE_PART * total)
    if free < need:
        return warned(
            f"{size_text(free)} free in /dev/shm, {size_text(need)} wanted",
            values={"size": f"{-(-need // 1024**3)}G"},
        )
    return passed(f"{size_text(free)} free in /dev/shm")


CHECKS = (object_store,)
