"""LIM: shared memory, open files, tasks, locked memory, path lengths."""

import errno
import os
from pathlib import Path
from typing import Final

from vcli.diagnostics.check import (
    Finding,
    Remedy,
    check,
    failed,
    passed,
    skipped,
    warned,
)
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.limits import (
    CAP_IPC_LOCK,
    CAP_SYS_RESOURCE,
    LOCKED_MEMORY,
    OPEN_FILES,
    PROCESSES,
    has_capability,
    open_files_needed,
    read_limit,
)
from vcli.diagnostics.text import GIB, MIB, plural, size_text

#: What Python's and torch's own shared memory want, whatever the plan.
BASE_SHM_BYTES: Final = 16 * MIB
#: NCCL's shared memory for one pair of ranks: about 10 MiB a channel.
SHM_BYTES_PER_PAIR: Final = 20 * MIB
#: Above this no more is really allocated, only looked at.
MAX_SHM_PROBE_BYTES: Final = 256 * MIB
GOOD_SHM_BYTES: Final = 1 * GIB

BASE_TASKS: Final = 100
TASKS_PER_RANK: Final = 60

GOOD_LOCKED_BYTES: Final = 64 * MIB

#: `sun_path` holds 108 bytes with the closing zero.
MAX_SOCKET_PATH: Final = 107
#: A name like those that Python's multiprocessing makes below TMPDIR.
_SOCKET_NAME: Final = "/pymp-xxxxxxxx/listener-xxxxxxxx"

_SHM_REMEDY: Final = Remedy(
    bare_metal="sudo mount -o remount,size={size} /dev/shm",
    docker="docker run --shm-size={size} …   (or --ipc=host)",
    kubernetes="volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {quantity}}}}}], "
    "mounted at /dev/shm",
    slurm="sudo mount -o remount,size={size} /dev/shm   on the node (ask its administrator)",
)


def _shm_need(context: CheckContext) -> int:
    ranks = len(context.local_ranks)
    pairs = ranks * (ranks - 1) // 2 if context.is_cuda else 0
    return BASE_SHM_BYTES + pairs * SHM_BYTES_PER_PAIR


def _shm_values(need: int) -> dict[str, object]:
    size = f"{max(1, -(-need // GIB))}G"
    return {"size": size, "quantity": f"{size}i"}


@check(
    "LIM-01",
    "size of /dev/shm",
    why="NCCL and Python's shared memory end with SIGBUS (exit 135) when it runs out",
    expected="20 MiB for each pair of GPU ranks, and 1 GiB where there are several",
    remedy=_SHM_REMEDY,
    is_preflight=True,
)
def shm_size(context: CheckContext) -> Finding:
    """Compares what is free in /dev/shm with what the ranks of this node will ask for.

    vcli's own rings are anonymous memory and need nothing here.
    """
    try:
        status = os.statvfs(context.files.path("/dev/shm"))
    except OSError as error:
        return failed(
            f"/dev/shm: {error.strerror}",
            remedy="sudo mount -t tmpfs -o size=1G tmpfs /dev/shm",
            blocks_launch=context.is_cuda,
        )
    free, need = status.f_bavail * status.f_frsize, _shm_need(context)
    measured = f"{size_text(free)} free in /dev/shm"
    if free < need:
        return failed(
            f"{measured}, {size_text(need)} needed",
            values=_shm_values(need),
            blocks_launch=context.is_cuda,
        )
    if context.is_cuda and len(context.local_ranks) > 1 and free < GOOD_SHM_BYTES:
        return warned(measured, values=_shm_values(GOOD_SHM_BYTES))
    return passed(measured)


@check(
    "LIM-02",
    "memory in /dev/shm can be allocated",
    why="a page that cannot be given later is SIGBUS (exit 135), not an error",
    expected="a file of the needed size can be made and allocated",
    remedy=_SHM_REMEDY,
    is_preflight=True,
)
def shm_allocation(context: CheckContext) -> Finding:
    """Makes a nameless file in /dev/shm, has the kernel allocate it, and drops it.

    At most 256 MiB are allocated. It sees what statvfs does not: a memory limit, a read-only mount.
    """
    need = min(_shm_need(context), MAX_SHM_PROBE_BYTES)
    folder = context.files.path("/dev/shm")
    try:
        _allocate(folder, need)
    except OSError as error:
        return failed(
            f"{size_text(need)} in /dev/shm: {error.strerror}",
            values=_shm_values(need),
            blocks_launch=context.is_cuda,
        )
    return passed(f"{size_text(need)} allocated and dropped")


def _allocate(folder: Path, size_bytes: int) -> None:
    try:
        descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        path = folder / f"vcli_probe_{os.getpid()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path.unlink()
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


@check(
    "LIM-04",
    "locked memory for RDMA",
    why="InfiniBand and RoCE pin their buffers, and NCCL ends with 'Call to ibv_reg_mr failed'",
    expected="unlimited (64 MiB at least), or CAP_IPC_LOCK",
    remedy=Remedy(
        bare_metal="echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf, then "
        "log in again",
        docker="docker run --ulimit memlock=-1:-1 …   (or --cap-add IPC_LOCK)",
        kubernetes="securityContext: capabilities: add: [IPC_LOCK]",
        slurm="PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, and LimitMEMLOCK=infinity for "
        "slurmd",
    ),
)
def locked_memory(context: CheckContext) -> Finding:
    """Reads the limit of locked memory where there is an RDMA device."""
    if not context.files.names("/sys/class/infiniband"):
        return skipped("no RDMA device")
    if has_capability(context.files, CAP_IPC_LOCK):
        return passed("CAP_IPC_LOCK is in effect")
    limit = read_limit(context.files, LOCKED_MEMORY)
    if limit is None:
        raise CannotMeasureError("/proc/self/limits lists no limit of locked memory")
    if limit.soft is None:
        return passed("unlimited")
    text = f"{size_text(limit.soft)} may be locked"
    return failed(text) if limit.soft < GOOD_LOCKED_BYTES else warned(text)


@check(
    "LIM-05",
    "open files",
    why="connections and rings use descriptors, and 'Too many open files' ends a busy server",
    expected="1024, and 64 for each rank of this node",
    remedy=Remedy(
        bare_metal="ulimit -n {need}   (hard limit: /etc/security/limits.d, then log in again)",
        docker="docker run --ulimit nofile={need}:{need} …",
        kubernetes="raise the container runtime's LimitNOFILE to {need} on the node",
        slurm="ulimit -n {need}   in the job script",
    ),
    is_preflight=True,
)
def open_files(context: CheckContext) -> Finding:
    """Compares the hard limit with the need; vcli raises the soft one itself.

    It warns where the kernel's own ceiling (fs.nr_open) forbids to raise the soft limit so far.
    """
    limit = read_limit(context.files, OPEN_FILES)
    if limit is None:
        raise CannotMeasureError("/proc/self/limits lists no limit of open files")
    need = open_files_needed(len(context.local_ranks))
    if limit.hard is not None and limit.hard < need:
        return failed(f"hard limit {limit.hard}, {need} needed", values={"need": need})
    if limit.soft is None or limit.soft >= need:
        return passed("unlimited" if limit.soft is None else f"{limit.soft}")
    ceiling = context.files.read_int("/proc/sys/fs/nr_open")
    if ceiling is not None and ceiling < need:
        return warned(
            f"soft limit {limit.soft}, fs.nr_open {ceiling}, {need} needed",
            remedy=f"sudo sysctl fs.nr_open={need}",
        )
    return passed(f"soft limit {limit.soft}, raised to {need} at start")


@check(
    "LIM-06",
    "threads and processes",
    why='a library that gets no thread aborts: "can\'t start new thread"',
    expected="room for 100 tasks, and 60 for each rank of this node",
    remedy=Remedy(
        bare_metal="ulimit -u {need}   (or TasksMax={need} in the systemd unit)",
        docker="docker run --pids-limit {need} …",
        kubernetes="podPidsLimit: {need} in the kubelet's configuration",
        slurm="ulimit -u {need}   in the job script",
    ),
    is_preflight=True,
)
def tasks(context: CheckContext) -> Finding:
    """Finds the tightest of the limits on tasks, and what it leaves.

    The limits: RLIMIT_NPROC of the user (none for root), pids.max of every control group of this
    process, threads-max and pid_max of the kernel.
    """
    need = BASE_TASKS + TASKS_PER_RANK * len(context.local_ranks)
    left = [(number, name) for name, number in _tasks_left(context).items() if number is not None]
    if not left:
        return passed("no limit")
    number, name = min(left)
    measured = f"{max(0, number)} more tasks under {name}"
    if number < need:
        return failed(f"{measured}, {need} needed", values={"need": need + _tasks_now(context)})
    return passed(measured)


def _tasks_left(context: CheckContext) -> dict[str, int | None]:
    files, running = context.files, _tasks_now(context)
    left: dict[str, int | None] = {"the control group's pids.max": context.cgroups.pids_left()}
    for name, place in (("threads-max", "/proc/sys/kernel/threads-max"),
                        ("pid_max", "/proc/sys/kernel/pid_max")):  # fmt: skip
        ceiling = files.read_int(place)
        left[f"kernel.{name}"] = ceiling - running if ceiling is not None else None
    limit = read_limit(files, PROCESSES)
    is_bound = limit is not None and not has_capability(files, CAP_SYS_RESOURCE)
    if is_bound and limit is not None and limit.soft is not None:
        left["RLIMIT_NPROC"] = limit.soft - _tasks_of_user(context)
    return left


def _tasks_now(context: CheckContext) -> int:
    """Tasks of the whole host, by /proc/loadavg (`running/all`)."""
    words = context.files.read_words("/proc/loadavg")
    total = words[3].partition("/")[2] if len(words) > 3 else ""
    return int(total) if total.isdigit() else 0


def _tasks_of_user(context: CheckContext) -> int:
    """Threads of all processes of this user, which RLIMIT_NPROC counts."""
    user, total = os.getuid(), 0
    for name in context.files.names("/proc"):
        if not name.isdigit():
            continue
        fields = dict(
            line.split(":", 1)
            for line in (context.files.read(f"/proc/{name}/status") or "").splitlines()
            if ":" in line
        )
        owner = fields.get("Uid", "").split()
        if owner and owner[0] == str(user):
            total += int(fields.get("Threads", "1"))
    return total


@check(
    "LIM-08",
    "length of socket paths",
    why="a socket file with a longer path cannot be made ('AF_UNIX path too long')",
    expected="paths of at most 107 bytes below TMPDIR",
    remedy=Remedy(
        bare_metal="export TMPDIR=/tmp",
        docker="docker run -e TMPDIR=/tmp …",
        kubernetes="env TMPDIR: /tmp",
        slurm="export TMPDIR=/tmp   in the job script",
    ),
)
def socket_path(context: CheckContext) -> Finding:
    """Adds the longest socket name that Python's multiprocessing and Ray make to TMPDIR.

    vcli's own sockets have no files.
    """
    folder = (context.environ.get("TMPDIR") or "/tmp").rstrip("/")
    length = len(os.fsencode(folder + _SOCKET_NAME))
    if length > MAX_SOCKET_PATH:
        return failed(f"{length} bytes below TMPDIR={folder}", blocks_launch=False)
    return passed(f"{plural(length, 'byte')} below {folder}")


CHECKS = (shm_size, shm_allocation, locked_memory, open_files, tasks, socket_path)
