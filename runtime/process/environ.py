"""The environment of a child, as pure functions from dicts to dicts.

Nothing here reads or writes the environment of a process: `entry` does, in the child.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

PYTHON_PATH = "PYTHONPATH"
SAVED_PYTHON_PATH = "VCLI_SAVED_PYTHONPATH"
OMP_NUM_THREADS = "OMP_NUM_THREADS"

#: NVLink multicast can put a host's GPUs out of service where the fabric does not allow it, so
#: what the user says about it reaches every child as it is.
UNTOUCHABLE = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


def worker_environ(
    base: Mapping[str, str],
    *,
    additions: Mapping[str, str] | None = None,
    omp_num_threads: int | None = None,
) -> dict[str, str]:
    """The environment of a child whose parent has `base`.

    `additions` replace what the parent has, except for the names in `UNTOUCHABLE`.
    `omp_num_threads` counts only where the user set no OMP_NUM_THREADS.
    """
    kept = {name: base[name] for name in UNTOUCHABLE if name in base}
    environ = {**base, **(additions or {}), **kept}
    if omp_num_threads is not None:
        environ.setdefault(OMP_NUM_THREADS, str(omp_num_threads))
    return environ


def bootstrap_environ(
    base: Mapping[str, str], search_path: Sequence[str], folder: Path
) -> dict[str, str]:
    """`base` plus what a fresh interpreter needs to import what the parent can import.

    `search_path` is the parent's `sys.path`; its relative entries are meant from `folder`.
    `restore_environ` undoes it in the child, so that programs started there see nothing of it.
    """
    environ = dict(base)
    if PYTHON_PATH in base:
        environ[SAVED_PYTHON_PATH] = base[PYTHON_PATH]
    else:
        environ.pop(SAVED_PYTHON_PATH, None)
    environ[PYTHON_PATH] = os.pathsep.join(str(folder / entry) for entry in search_path)
    return environ


def restore_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` as it was before `bootstrap_environ`."""
    restored = dict(environ)
    restored.pop(PYTHON_PATH, None)
    saved = restored.pop(SAVED_PYTHON_PATH, None)
    if saved is not None:
        restored[PYTHON_PATH] = saved
    return restored
