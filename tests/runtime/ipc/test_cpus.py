"""Usable CPUs: the affinity, cut to the tightest quota of the process' cgroups."""

import os
from pathlib import Path

import pytest

from vcli.runtime.ipc.cpus import usable_cpus


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/a/b\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_affinity_counts_without_a_quota(proc: Path) -> None:
    write(proc / "cg/a/b/cpu.max", "max 100000\n")
    assert usable_cpus(proc, proc / "cg") == 16


def test_quota_of_a_group_above_counts_too(proc: Path) -> None:
    write(proc / "cg/a/b/cpu.max", "800000 100000\n")
    write(proc / "cg/a/cpu.max", "350000 100000\n")
    assert usable_cpus(proc, proc / "cg") == 3


def test_quota_below_one_cpu_is_one(proc: Path) -> None:
    write(proc / "cg/a/b/cpu.max", "50000 100000\n")
    assert usable_cpus(proc, proc / "cg") == 1


@pytest.mark.parametrize(("quota", "expected"), [("400000", 4), ("-1", 16)])
def test_quota_of_cgroups_version_1(proc: Path, quota: str, expected: int) -> None:
    (proc / "self/cgroup").write_text("4:cpu,cpuacct:/a\n1:name=systemd:/x\n")
    write(proc / "cg/cpu/a/cpu.cfs_quota_us", f"{quota}\n")
    write(proc / "cg/cpu/a/cpu.cfs_period_us", "100000\n")
    assert usable_cpus(proc, proc / "cg") == expected


def test_no_files_no_limit(proc: Path) -> None:
    assert usable_cpus(proc / "none", proc / "none") == 16
