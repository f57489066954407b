"""Taking the device of a rank, and what has to happen on it before anything is measured."""

import random

import numpy as np
import torch

from vcli.runtime.config import EngineConfig
from vcli.runtime.log import get_logger
from vcli.topology.errors import UnfitError
from vcli.topology.plan import RankPlan

logger = get_logger(__name__)


def take_device(config: EngineConfig, plan: RankPlan, dtype: torch.dtype) -> torch.device:
    """The device that the plan names, made the current one of this thread.

    Raises:
        UnfitError: it is not there, or can't compute in `dtype`.
    """
    if config.device_type == "cpu":
        return torch.device("cpu")
    index, count = plan.device_index, torch.cuda.device_count()
    if index >= count:
        raise UnfitError(
            f"rank {plan.rank} is planned on cuda:{index}, {count} CUDA devices are visible",
            hint="check CUDA_VISIBLE_DEVICES, name them with --device-ids, or lower "
            "--tensor-parallel-size",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    found = device_uuid(device)
    if found and plan.device_uuid and found != plan.device_uuid:
        logger.warning(
            "rank %d: %s is %s, the plan is made for %s: CUDA numbers the GPUs in another order; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them with --device-ids",
            plan.rank, device, found, plan.device_uuid,
        )  # fmt: skip
    if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise UnfitError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16", hint="--dtype float16"
        )
    return device


def device_uuid(device: torch.device) -> str:
    """The name that NVML has for a GPU (`GPU-8f3a...`); "" for others."""
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return f"GPU-{uuid}" if uuid else ""


def seed_generators(seed: int) -> None:
    """Seed every generator that a layer or a library may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def warm_up_blas(device: torch.device, dtype: torch.dtype) -> None:
    """Let cuBLAS and cuBLASLt take their workspaces, which they never give back.

    Before the first measurement, so that they count as what was there before.
    """
    matrix = torch.zeros((16, 16), device=device, dtype=dtype)
    torch.mm(matrix, matrix)
    torch.nn.functional.linear(matrix, matrix, matrix[0])
    torch.cuda.synchronize(device)
