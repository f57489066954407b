"""FlashInfer's kernels: whether they are compiled, and compiling them ahead of their first use.

FlashInfer compiles with nvcc and ninja when a plan first needs a module, for half a minute and
more. Its cache folder is that of FLASHINFER_WORKSPACE_BASE, which must be set before the import.
"""

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from vcli.topology.errors import UnfitError

#: `auto` would take FlashInfer's `fa3` for prefills on Hopper: a second module, compiled three
#: times as long.
KERNEL_BACKEND: Final = "fa2"
#: A run of ninja that only looks takes some hundredths of a second.
LOOK_TIMEOUT_S: Final = 30.0
TERMINATE_GRACE_S: Final = 5.0
#: How much of the compiler's output an error shows.
SHOWN_CHARACTERS: Final = 2000
NO_POSITION_ENCODING: Final = 0

#: Runs the command in argv[2:], which gets SIGTERM when the thread that started it ends: ninja then
#: ends its compilers and removes their half-written files. argv[1] is the id of the parent, which
#: may be gone before the request is made.
RUN_WITH_PARENT: Final = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def import_flashinfer() -> Any:
    """The module; it makes its cache folder and, on a machine with GPUs, a CUDA context.

    Raises:
        UnfitError: it is not installed, or something that it needs is missing.
    """
    try:
        return import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise UnfitError(
            f"FlashInfer cannot be imported: {error}",
            hint="pip install 'vcli-toolkit[gpu]', or --attention-backend triton",
        ) from error


def kernels_ready(dtype: torch.dtype, head_size: int) -> bool:
    """Whether a plan for these would find its kernels compiled. Takes a moment, compiles nothing.

    False as well while somebody compiles them, and where nvcc or ninja is missing.

    Raises:
        UnfitError: FlashInfer cannot be imported.
    """
    import_flashinfer()
    try:
        spec = _spec(dtype, head_size)
        if spec.is_aot:
            return True
        if not spec.jit_library_path.exists():
            return False
        spec.write_ninja()
        look = subprocess.run(
            [*_ninja(spec), "-n"], capture_output=True, timeout=LOOK_TIMEOUT_S, check=False
        )
    except (OSError, RuntimeError, subprocess.TimeoutExpired):  # RuntimeError: no nvcc
        return False
    return b"no work to do" in look.stdout


def compile_kernels(dtype: torch.dtype, head_size: int, *, timeout_s: float) -> None:
    """Compile what a plan for these needs; returns when it is there, whoever compiled it.

    Blocks, so call it from a thread of its own; the compilers end with that thread. One process
    of the machine compiles, under the lock that FlashInfer itself takes; the kernel frees it with
    its holder.

    Raises:
        UnfitError: no compiler, a failed compilation, or not ready after `timeout_s`.
    """
    from filelock import FileLock, Timeout

    deadline = time.monotonic() + timeout_s
    import_flashinfer()
    try:
        spec = _spec(dtype, head_size)
        with FileLock(spec.lock_path, timeout=timeout_s, thread_local=False):
            if not kernels_ready(dtype, head_size):
                spec.write_ninja()
                _compile(spec, deadline - time.monotonic())
    except Timeout as error:
        raise _not_ready(
            f"after {timeout_s:g} s another process still holds {error.lock_file}"
        ) from None
    except (OSError, RuntimeError) as error:  # a folder that cannot be written; no nvcc
        raise _not_ready(str(error)) from error


def _spec(dtype: torch.dtype, head_size: int) -> Any:
    """FlashInfer's description of the module that both wrappers of the back end use."""
    return import_module("flashinfer.jit").gen_batch_prefill_module(
        backend=KERNEL_BACKEND,
        dtype_q=dtype,
        dtype_kv=dtype,
        dtype_o=dtype,
        dtype_idx=torch.int32,
        head_dim_qk=head_size,
        head_dim_vo=head_size,
        pos_encoding_mode=NO_POSITION_ENCODING,
        use_sliding_window=False,
        use_logits_soft_cap=False,
        use_fp16_qk_reduction=False,
    )


def _ninja(spec: Any) -> list[str]:
    build_dir: Path = spec.build_dir.resolve()
    return ["ninja", "-C", str(build_dir), "-f", str(spec.ninja_path.resolve())]


def _compile(spec: Any, timeout_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN_WITH_PARENT, str(os.getpid()), *_ninja(spec)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        raise _not_ready("the deadline passed while nvcc was at work") from None
    finally:
        _end(process)
    if process.returncode != 0:
        tail = output[-SHOWN_CHARACTERS:].strip()
        raise _not_ready(f"ninja ended with {process.returncode}: {tail}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # first not kill: ninja has to end the compilers
    try:
        process.communicate(timeout=TERMINATE_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _not_ready(why: str) -> UnfitError:
    return UnfitError(
        f"FlashInfer's kernels could not be compiled: {why}",
        hint="nvcc, ninja and a C++ compiler must be on PATH; or --attention-backend triton",
    )
