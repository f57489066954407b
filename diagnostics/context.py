"""Everything a check may look at: the host through replaceable seams, the plan, the model."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vcli.diagnostics.cgroups import Cgroups
from vcli.diagnostics.cuda_driver import CudaAnswer, ask_cuda_driver
from vcli.diagnostics.dialect import Dialect
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.gpu import Nvml, NvmlProblem
from vcli.diagnostics.limits import ZmqLimits, read_zmq_limits
from vcli.diagnostics.memory_policy import memory_policy_errno
from vcli.diagnostics.packages import Interpreter, Packages
from vcli.diagnostics.sockets import Network
from vcli.diagnostics.trial import Trial
from vcli.topology import (
    ConfigError,
    GpuFacts,
    HostFacts,
    ModelSpec,
    ProcessFacts,
    RankPlan,
    TopologyPlan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """The model that was named.

    `folder` is None for a Hub name that is not on this machine, and for a single file. `problem`
    is why there is no `spec`.
    """

    typed: str
    folder: Path | None = None
    config: Mapping[str, Any] | None = None
    spec: ModelSpec | None = None
    problem: ConfigError | None = None
    is_hub_name: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """A port that a launch would listen on; `flag` moves it, `is_typed` if the user gave it."""

    purpose: str
    address: str
    port: int
    flag: str
    is_typed: bool


def no_trial(additions: Mapping[str, str]) -> Trial:
    """What a context gives that has nobody to try devices."""
    del additions
    return Trial(skip_reason="devices are not tried here: vcli doctor does it")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """What the checks of one run share; they change nothing in it.

    `plan` is made without the model where `model` has no shape or does not fit. `gpu_problem` is
    why the GPUs of `host` are known less than they could be. `nvml_module` stands in for pynvml;
    `allowed_cpus` is asked of the kernel where it is empty. With `is_deep` a check takes its time
    and measures what it would estimate. `try_devices` runs processes on the devices, with
    additions to their environment, and gives the same result for the same ones again.
    """

    plan: TopologyPlan
    host: HostFacts
    files: HostFiles = field(default_factory=HostFiles)
    environ: Mapping[str, str] = field(default_factory=dict)
    process: ProcessFacts = field(default_factory=ProcessFacts)
    dialect: Dialect = Dialect.BARE_METAL
    model: ModelInput | None = None
    network: Network = field(default_factory=Network)
    packages: Packages = field(default_factory=Packages)
    interpreter: Interpreter = field(default_factory=Interpreter)
    ports: tuple[PortUse, ...] = ()
    gpu_problem: str = ""
    nvml_module: Any = None
    allowed_cpus: frozenset[int] = frozenset()
    memory_policy: Callable[[], int | None] = memory_policy_errno
    ask_cuda: Callable[[], CudaAnswer] = ask_cuda_driver
    zmq_limits: Callable[[], ZmqLimits | None] = read_zmq_limits
    try_devices: Callable[[Mapping[str, str]], Trial] = no_trial
    is_deep: bool = False
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    @property
    def cgroups(self) -> Cgroups:
        """The control groups of this process."""
        return Cgroups(self.files)

    @property
    def local_ranks(self) -> tuple[RankPlan, ...]:
        """The ranks that would run on this node."""
        return self.plan.local_ranks(self.plan.config.own_node_rank)

    @property
    def nnodes(self) -> int:
        """Nodes of the deployment."""
        return self.plan.config.num_hosts

    @property
    def is_cuda(self) -> bool:
        """Whether the ranks would run on GPUs."""
        return self.plan.device_type == "cuda"

    def affinity(self) -> frozenset[int]:
        """CPUs that this process may run on."""
        return self.allowed_cpus or frozenset(os.sched_getaffinity(0))

    @property
    def has_nvidia(self) -> bool:
        """Whether anything points to NVIDIA GPUs: the plan, the driver's files, or NVML."""
        return (
            self.is_cuda
            or bool(self.host.gpus)
            or self.files.exists("/proc/driver/nvidia/version")
            or self.files.exists("/dev/nvidiactl")
        )

    @property
    def gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs that the ranks of this node would use; all visible ones without a plan for them.

        One rank without a model is what is planned when nothing was typed.
        """
        is_default = self.plan.world_size_across_dp == 1 and self.plan.model is None
        if not self.is_cuda or is_default:
            return self.host.gpus
        wanted = {rank.device_index for rank in self.local_ranks}
        return tuple(gpu for gpu in self.host.gpus if gpu.index in wanted)

    def open_nvml(self) -> Nvml:
        """A session with NVML.

        Raises:
            CannotMeasureError: there is none; CUDA-01 says why.
        """
        session = Nvml.open(self.nvml_module)
        if isinstance(session, NvmlProblem):
            raise CannotMeasureError(f"NVML: {session.text}")
        return session
