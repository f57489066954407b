"""The environment of a child, as pure functions from dicts to dicts.

Nothing here reads or writes the environment of a process: `entry` does, in the child.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

PYTHON_PATH = "PYTHONPATH"
SAVED_PYTHON_PATH = "VCLI_SAVED_PYTHONPATH"
OMP_NUM_THREADS = "OMP_NUM_THREADS"

#: NVLink multicast can put a host's GPUs out of service where the fabric does not allow it, so
#: what the user says about it reaches every child as it is.
UNTOUCHABLE = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")

#: cuBLASLt knows faster products for few rows than torch's default library (64 rows of an 8B
#: shape: 119 us a layer instead of 128). Torch reads it when it is imported.
PREFERS_CUBLASLT = "TORCH_BLAS_PREFER_CUBLASLT"

#: What every rank gets unless the user says otherwise. Torch makes a multicast object whenever
#: symmetric memory is opened, whether it is used or not.
RANK_DEFAULTS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", PREFERS_CUBLASLT: "1"}

#: Ours is a default: the user knows the network better.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo"

#: How Ray's library finds its cluster.
RAY_ADDRESS = "RAY_ADDRESS"

_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")


def worker_environ(
    base: Mapping[str, str],
    *,
    additions: Mapping[str, str] | None = None,
    omp_num_threads: int | None = None,
) -> dict[str, str]:
    """The environment of a child whose parent has `base`.

    `additions` replace what the parent has, except for the names in `UNTOUCHABLE`, the interfaces
    of gloo and NCCL, and the choice of cuBLASLt. `omp_num_threads` counts only without the user's
    OMP_NUM_THREADS.
    """
    untouched = (*UNTOUCHABLE, GLOO_INTERFACE, NCCL_INTERFACE, PREFERS_CUBLASLT)
    kept = {name: base[name] for name in untouched if name in base}
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


def one_host_environ() -> dict[str, str]:
    """Additions for ranks that all run on this host.

    By itself gloo takes the interface of the host's name, which may be any, or none.
    """
    names = {name for _, name in socket.if_nameindex()}
    return RANK_DEFAULTS | ({GLOO_INTERFACE: LOOPBACK} if LOOPBACK in names else {})


def interface_environ(interface: str) -> dict[str, str]:
    """Additions for ranks that reach others by this interface; "" where it is not known."""
    names = {GLOO_INTERFACE: interface, NCCL_INTERFACE: interface} if interface else {}
    return RANK_DEFAULTS | names


def first_number(value: str) -> int | None:
    """The first of the numbers in a value like OMP_NUM_THREADS=4,2; None where there is none."""
    first = value.split(",", maxsplit=1)[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def variables_in(text: str, environ: Mapping[str, str]) -> list[str]:
    """Variables, set in `environ`, whose names stand in `text`; names without `_` are words."""
    return sorted({*_VARIABLE.findall(text)} & environ.keys())
