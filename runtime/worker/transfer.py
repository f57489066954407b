"""Host arrays to tensors of this rank's device."""

from typing import Any

import numpy.typing as npt
import torch


def to_tensor(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`: shared on a CPU; to a GPU through pinned memory, without a wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
