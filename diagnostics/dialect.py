"""Where vcli runs, as far as it decides what a person types to change something."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

_CONTAINER_FILES: Final = (".dockerenv", "run/.containerenv")
_CONTAINER_WORDS: Final = ("docker", "containerd", "libpod", "lxc", "crio")


class Dialect(StrEnum):
    """The kinds of surroundings that remedies are written for."""

    BARE_METAL = "bare metal"
    DOCKER = "docker"
    KUBERNETES = "kubernetes"
    SLURM = "slurm"


def detect_dialect(environ: Mapping[str, str], root: Path = Path("/")) -> Dialect:
    """The innermost surroundings: a pod, a container, a Slurm job, or nothing of these."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return Dialect.KUBERNETES
    if is_container(root):
        return Dialect.DOCKER
    if "SLURM_JOB_ID" in environ:
        return Dialect.SLURM
    return Dialect.BARE_METAL


def is_container(root: Path = Path("/")) -> bool:
    """Whether the file system shows the marks of a container."""
    if any((root / name).exists() for name in _CONTAINER_FILES):
        return True
    try:
        groups = (root / "proc/1/cgroup").read_text()
    except OSError:
        return False
    return any(word in groups for word in _CONTAINER_WORDS)
