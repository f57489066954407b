"""NVML as the checks ask it: one session, absent answers as None, lost devices as a named error.

Makes no CUDA context. `module` is pynvml, or a stand-in with the same functions.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from vcli.diagnostics.errors import CannotMeasureError
from vcli.topology import GpuFacts

Answer = TypeVar("Answer")

NO_PERMISSION: Final = 4
DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN_ERROR: Final = 999

#: The driver or the device has no answer to this question.
_NO_ANSWER: Final = (2, 3, 6, 13, 22, 25, 26)  # argument, support, found, function, ECC, version


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlProblem:
    """Why NVML could not be started; `code` is its return value, None without the module."""

    code: int | None
    text: str


class DeviceLostError(Exception):
    """The device no longer answers: it fell off the bus, or must be reset."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.is_lost = code == GPU_IS_LOST


class Nvml:
    """A session; `open` it once, ask as often as wanted. Safe from any thread."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @classmethod
    def open(cls, module: Any | None = None) -> "Nvml | NvmlProblem":
        """A session, or why there is none; `module` may be a name to import."""
        if module is None or isinstance(module, str):
            try:
                module = importlib.import_module(module or "pynvml")
            except ImportError:
                return NvmlProblem(code=None, text="nvidia-ml-py is not installed")
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            return NvmlProblem(code=int(getattr(error, "value", UNKNOWN_ERROR)), text=str(error))
        return cls(module)

    def ask(self, question: Callable[[Any], Answer]) -> Answer | None:
        """The answer; None where driver or device have none.

        Raises:
            DeviceLostError: the device is gone.
            CannotMeasureError: NVML refuses to say (permission, unknown error).
        """
        try:
            return question(self.module)
        except self.module.NVMLError as error:
            code = int(getattr(error, "value", UNKNOWN_ERROR))
            if code in _NO_ANSWER:
                return None
            if code in (GPU_IS_LOST, RESET_REQUIRED):
                raise DeviceLostError(code) from error
            raise CannotMeasureError(f"NVML: {error}") from error
        except AttributeError:  # a pynvml that is older than the question
            return None

    def handle(self, gpu: GpuFacts) -> Any:
        """NVML's handle of a visible GPU.

        Raises:
            CannotMeasureError: there is no such device any more.
        """
        if gpu.uuid.startswith("GPU-"):
            found = self.ask(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
        else:
            found = self.ask(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(gpu.index))
        if found is None:
            raise CannotMeasureError(f"NVML does not know GPU {gpu.index} ({gpu.uuid})")
        return found
