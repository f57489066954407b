"""Whether a copy of this process can work: what else runs in it, and what it has touched."""

import contextlib
import ctypes
import os
import re
import sys
from pathlib import Path

#: omp_pause_hard of OpenMP 5: threads and everything else are given back.
_OMP_PAUSE = "omp_pause_resource_all"
_OMP_PAUSE_HARD = 2

#: Open only in a process that has a CUDA context; the monitoring library leaves it alone.
_CUDA_DEVICE = "/dev/nvidia-uvm"

#: Packages that use a device as soon as they are imported, or soon after.
_CUDA_USERS = ("bitsandbytes", "cupy", "numba.cuda", "pycuda", "tensorflow", "jax", "deepspeed")

_GOMP_PATH = re.compile(r"\s(/\S*/libgomp[.-][^/\s]*)$", re.MULTILINE)


def thread_names() -> list[str]:
    """The threads of this process as the kernel knows them, those of libraries too."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            names.append((task / "comm").read_text().strip())
    return names


def is_cuda_in_use() -> bool:
    """Whether this process has used a CUDA device, through whichever library."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return True
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == _CUDA_DEVICE:  # noqa: PTH115 - as a string
                return True
    return False


def cuda_user() -> str | None:
    """Who probably used the device in this process: packages that do so by themselves, or torch."""
    found = [name for name in _CUDA_USERS if name in sys.modules]
    if found:
        return ", ".join(found)
    return "torch" if "torch" in sys.modules else None


def is_xpu_in_use() -> bool:
    """Whether torch has used an XPU in this process."""
    xpu = getattr(sys.modules.get("torch"), "xpu", None)
    return xpu is not None and bool(xpu.is_initialized())


def loaded_libgomps() -> list[str]:
    """Paths of the OpenMP runtimes of GNU in this process; torch brings its own."""
    return sorted(set(_GOMP_PATH.findall(Path("/proc/self/maps").read_text())))


def release_libgomp() -> None:
    """Let go of the threads of every libgomp: it starts new ones when they are needed.

    Without it a copy of this process waits for ever for threads that only the original has.
    """
    for path in loaded_libgomps():
        pause = getattr(ctypes.CDLL(path), _OMP_PAUSE, None)
        if pause is not None:
            pause(_OMP_PAUSE_HARD)


def has_stuck_libgomp() -> bool:
    """Whether a libgomp is loaded that can't let go of its threads: those before OpenMP 5.0."""
    return any(getattr(ctypes.CDLL(path), _OMP_PAUSE, None) is None for path in loaded_libgomps())


def fork_problem() -> str:
    """Why a copy of this process would not work; empty when it would."""
    names = thread_names()
    if len(names) > 1:
        return f"{len(names)} threads are alive: {', '.join(sorted(names))}"
    if is_cuda_in_use():
        return f"CUDA was initialised by {cuda_user()}"
    if is_xpu_in_use():
        return "XPU was initialised"
    return ""
