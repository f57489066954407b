"""Segments: allocated, sealed, refused in time, gone without a trace."""

import fcntl
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vcli.runtime.ipc import segment as segment_module
from vcli.runtime.ipc.segment import MemoryBudget, SharedSegment, memory_budgets
from vcli.topology.errors import UnfitError

MIB = 1 << 20


def test_two_mappings_show_the_same_bytes():
    made = SharedSegment.create(MIB, "vcli-test")
    attached = SharedSegment.attach(os.dup(made.fd))
    made.buffer[12345:12348] = b"abc"
    assert bytes(attached.buffer[12345:12348]) == b"abc"
    assert attached.size_bytes == MIB
    made.close()
    attached.buffer[0] = 1
    attached.close()


def test_a_new_segment_is_zero_and_all_of_it_is_allocated():
    made = SharedSegment.create(MIB, "vcli-test")
    assert bytes(made.buffer) == bytes(MIB)
    assert os.fstat(made.fd).st_blocks * 512 == MIB
    made.close()


def test_nobody_can_shrink_it():
    made = SharedSegment.create(MIB, "vcli-test")
    with pytest.raises(PermissionError):
        os.ftruncate(made.fd, 4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    made.close()


def test_it_has_a_name_in_proc_and_none_in_dev_shm_that_could_be_removed():
    before = set(Path("/dev/shm").iterdir())
    made = SharedSegment.create(MIB, "vcli-steps")
    assert "memfd:vcli-steps" in str(Path(f"/proc/self/fd/{made.fd}").readlink())
    assert set(Path("/dev/shm").iterdir()) == before
    made.close()


def test_close_gives_descriptors_back_and_may_be_repeated(count_fds):
    before = count_fds()
    made = SharedSegment.create(MIB, "vcli-test")
    made.close()
    made.close()
    assert count_fds() == before
    with pytest.raises(ValueError, match="closed"):
        _ = made.buffer


def test_a_view_that_is_still_held_outlives_close():
    made = SharedSegment.create(MIB, "vcli-test")
    view = made.buffer[:3]
    view[:] = b"abc"
    made.close()
    assert bytes(view) == b"abc"


def test_more_than_the_machine_has_is_refused_with_the_numbers():
    with pytest.raises(UnfitError, match=r"'vcli-big' needs 4194304\.0 MiB .* this machine has"):
        SharedSegment.create(4 << 40, "vcli-big")


def test_what_a_cgroup_does_not_grant_is_refused(monkeypatch):
    budget = MemoryBudget(source="memory cgroup X", limit_bytes=64 * MIB, available_bytes=40 * MIB)
    monkeypatch.setattr(segment_module, "memory_budgets", lambda: [budget])
    SharedSegment.create(8 * MIB, "fits").close()
    with pytest.raises(UnfitError, match=r"needs 9\.0 MiB .*cgroup X has 40\.0 MiB free of 64\.0"):
        SharedSegment.create(9 * MIB, "vcli-test")


def test_a_file_size_limit_is_an_error_with_its_reason(count_fds):
    before = count_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(UnfitError, match=r"2\.0 MiB segment 'vcli-test': File too large"):
            SharedSegment.create(2 * MIB, "vcli-test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert count_fds() == before


def test_old_kernels_without_noexec_memfd_still_get_a_segment(monkeypatch):
    memfd_create = os.memfd_create

    def old_kernel(name: str, flags: int) -> int:
        if flags & 8:
            raise OSError(22, "Invalid argument")
        return memfd_create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    SharedSegment.create(MIB, "vcli-test").close()


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def fake_proc(root: Path, cgroup: str) -> Path:
    write(root / "proc", meminfo="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
    write(root / "proc/self", cgroup=cgroup)
    return root / "proc"


def test_cgroup_v2_counts_every_ancestor_and_not_the_cold_file_cache(tmp_path):
    proc = fake_proc(tmp_path, "0::/pod/container\n")
    cgroups = tmp_path / "cgroup"
    stat = "anon 10\ninactive_file 50\n"
    write(cgroups / "pod", memory__max="1000", memory__current="900", memory__stat=stat)
    write(cgroups / "pod/container", memory__max="max", memory__current="800")
    budgets = memory_budgets(proc, cgroups)
    assert [(b.limit_bytes, b.available_bytes) for b in budgets] == [
        (1000 * 1024, 600 * 1024),
        (1000, 150),
    ]


def test_cgroup_v1_is_read_and_its_huge_number_is_no_limit(tmp_path):
    proc = fake_proc(tmp_path, "4:cpu,memory:/docker/abc\n1:cpu:/x\n0::/\n")
    v1 = tmp_path / "cgroup/memory"
    write(v1, memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5")
    write(v1 / "docker/abc", memory__limit_in_bytes="700", memory__usage_in_bytes="600")
    write(v1 / "docker/abc", memory__stat="inactive_file 1\ntotal_inactive_file 30\n")
    assert [b.available_bytes for b in memory_budgets(proc, tmp_path / "cgroup")] == [614400, 130]


def test_a_container_that_sees_only_its_own_cgroup_root_is_limited_too(tmp_path):
    proc = fake_proc(tmp_path, "0::/kubepods/pod1/abc\n")
    write(tmp_path / "cgroup", memory__max="500", memory__current="100")
    assert [b.available_bytes for b in memory_budgets(proc, tmp_path / "cgroup")] == [614400, 400]


SMALL_SHM = """
import os, shutil, sys
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
assert shutil.disk_usage("/dev/shm").total == 65536
if sys.argv[1] == "full":
    with open("/dev/shm/filler", "wb", buffering=0) as filler:
        filler.write(bytes(65536))
    assert shutil.disk_usage("/dev/shm").free == 0
writer = BroadcastWriter.create(1, 8 << 20, "steps")
reader = BroadcastReader.attach(writer.reader_handle(0))
for _ in range(8):
    writer.send([bytes(3 << 20)])
    assert len(reader.recv()[0]) == 3 << 20
print("whole")
"""


@pytest.mark.process
@pytest.mark.parametrize("content", ["empty", "full"])
def test_a_small_or_full_dev_shm_gives_no_sigbus(content):
    unshare = shutil.which("unshare")
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root for a mount namespace of its own")
    probe = subprocess.run(
        [unshare, "--mount", "sh", "-c", mount], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        pytest.skip(f"no mount namespace here: {probe.stderr.strip()}")
    command = f'{mount} && exec "$0" -c "$1" "$2"'
    run = subprocess.run(
        [unshare, "--mount", "sh", "-c", command, sys.executable, SMALL_SHM, content],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "whole\n"), run.stderr
