"""The CUDA driver library, asked in a child: it may hang, and a process that asked it cannot fork.

Makes no context on any device, and no multicast object: it only reads attributes.
"""

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from vcli.diagnostics.errors import CannotMeasureError

#: Nineteen GPUs of a fresh driver take about ten.
DEADLINE_S: Final = 20.0
MULTICAST_SUPPORTED: Final = 132
"""CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED"""

NO_LIBRARY: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaAnswer:
    """`code` of cuInit, NO_LIBRARY without libcuda; `multicast` for each visible device."""

    code: int
    multicast: tuple[bool, ...] = ()


def ask_cuda_driver(deadline_s: float = DEADLINE_S) -> CudaAnswer:
    """Start a child that asks, and wait for it.

    Raises:
        CannotMeasureError: it did not answer in time, or ended without an answer.
    """
    command = [sys.executable, "-P", "-m", "vcli.diagnostics.cuda_driver"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False
        )
        code, multicast = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise CannotMeasureError(f"cuInit did not come back within {deadline_s:g} s") from error
    except (OSError, ValueError) as error:
        raise CannotMeasureError(f"the child that asks libcuda gave no answer: {error}") from error
    return CudaAnswer(code=code, multicast=tuple(multicast))


def _ask_here() -> tuple[int, list[bool]]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_LIBRARY, []
    code = int(cuda.cuInit(0))
    count = ctypes.c_int(0)
    if code or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return code, []
    return code, [_supports_multicast(cuda, index) for index in range(count.value)]


def _supports_multicast(cuda: ctypes.CDLL, index: int) -> bool:
    device, value = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuDeviceGet(ctypes.byref(device), index):
        return False
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), MULTICAST_SUPPORTED, device)
    return not failed and bool(value.value)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_ask_here()))
