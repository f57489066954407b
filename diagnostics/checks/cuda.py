"""CUDA: driver, device nodes, visible devices; no CUDA context is made."""

import re
from typing import Final

from vcli.diagnostics.check import (
    Finding,
    Level,
    Remedy,
    check,
    failed,
    passed,
    skipped,
    unknown,
    warned,
)
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.gpu import (
    DRIVER_NOT_LOADED,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    Nvml,
    NvmlProblem,
)
from vcli.diagnostics.packages import version_tuple
from vcli.diagnostics.text import listing

NO_GPU: Final = "no NVIDIA GPU"

#: Oldest Linux driver for a major CUDA version.
MIN_DRIVER: Final = {11: (450, 80), 12: (525, 60), 13: (580, 65)}

CONTAINER_GPUS: Final = Remedy(
    bare_metal="sudo modprobe nvidia nvidia_uvm; nvidia-smi",
    docker="docker run --gpus all …   (NVIDIA's container toolkit must be installed on the host)",
    kubernetes="resources: limits: nvidia.com/gpu: N   (and NVIDIA's device plugin)",
    slurm="#SBATCH --gres=gpu:N",
)


@check(
    "CUDA-01",
    "the driver answers",
    level=Level.L1,
    why="without it no process can use a GPU",
    expected="NVML starts",
    remedy=CONTAINER_GPUS,
    deadline_s=5.0,
)
def nvml_starts(context: CheckContext) -> Finding:
    """Starts NVML, the driver's own monitoring library, and maps its return code.

    12: no library, 9: driver not loaded, 18: library and driver of different versions, 4: no
    permission. Without any sign of an NVIDIA GPU the group does not apply.
    """
    if not context.has_nvidia:
        return skipped(NO_GPU)
    session = Nvml.open(context.nvml_module)
    if isinstance(session, Nvml):
        version = context.host.driver_version
        return passed(f"driver {version}" if version else "NVML starts")
    return _nvml_failure(session)


def _nvml_failure(problem: NvmlProblem) -> Finding:
    if problem.code is None:
        return unknown(problem.text, remedy="pip install nvidia-ml-py")
    remedies: dict[int, Remedy | str] = {
        LIB_RM_VERSION_MISMATCH: "reboot, so that the kernel loads the module of the installed "
        "driver   (or: sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia)",
        NO_PERMISSION: Remedy(
            bare_metal="sudo usermod -aG video,render $USER, then log in again",
            docker="docker run --gpus all …   (without --device lines of your own)",
        ),
        DRIVER_NOT_LOADED: CONTAINER_GPUS,
        LIBRARY_NOT_FOUND: Remedy(
            bare_metal="install NVIDIA's driver: sudo apt-get install nvidia-driver-580-server",
            docker="docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …",
            kubernetes="resources: limits: nvidia.com/gpu: N",
        ),
    }
    return failed(
        f"NVML: {problem.text} (code {problem.code})",
        remedy=remedies.get(problem.code, CONTAINER_GPUS),
    )


@check(
    "CUDA-02",
    "driver new enough for torch's CUDA",
    level=Level.L1,
    why="an old driver refuses the CUDA that torch brings",
    expected="a driver of at least the version that this CUDA needs",
    remedy=Remedy(
        bare_metal="install a driver of {need} or newer and reboot; or a torch for CUDA {version}, "
        "by the line that https://pytorch.org/get-started/locally shows",
        docker="update the driver of the host to {need} or newer, or use an image with an older "
        "CUDA",
    ),
    requires=("CUDA-01",),
)
def driver_version(context: CheckContext) -> Finding:
    """Compares the driver's version with the least that the major CUDA version of torch needs."""
    build, driver = context.packages.torch_build(), context.host.driver_version
    if build is None or build.cuda is None:
        return skipped("torch has no CUDA")
    if driver is None:
        return skipped("the driver's version is not known")
    major = version_tuple(build.cuda)[0]
    need = MIN_DRIVER.get(major)
    text = f"driver {driver}, torch is for CUDA {build.cuda}"
    if need is None or version_tuple(driver)[:2] >= need:
        return passed(text)
    fitting = max((m for m, least in MIN_DRIVER.items() if version_tuple(driver)[:2] >= least),
                  default=11)  # fmt: skip
    builds = {11: "11.8", 12: "12.6", 13: "13.0"}
    return failed(
        f"{text}, which needs {need[0]}.{need[1]} or newer",
        values={"need": f"{need[0]}.{need[1]}", "version": builds[fitting]},
    )


@check(
    "CUDA-03",
    "kernel module and library are one version",
    why="after an update of the driver without a reboot every call fails",
    expected="equal versions",
    remedy=Remedy(
        bare_metal="reboot   (or: sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia)",
        docker="restart the container after the host was rebooted; remove libnvidia-* of its own "
        "from the image",
    ),
    requires=("CUDA-01",),
)
def module_version(context: CheckContext) -> Finding:
    """Compares /proc/driver/nvidia/version with what NVML says."""
    text = context.files.read("/proc/driver/nvidia/version")
    library = context.host.driver_version
    match = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text or "")
    if match is None or library is None:
        return skipped("the kernel module does not tell its version")
    if match[1] != library:
        return failed(f"kernel module {match[1]}, library {library}")
    return passed(library)


@check(
    "CUDA-04",
    "no compat libcuda in the way",
    why="a compat library on a driver that does not allow it is error 803 or 804",
    expected="the driver's own libcuda.so.1 first",
    remedy=Remedy(
        bare_metal="export LD_LIBRARY_PATH={path}",
        docker="docker run -e LD_LIBRARY_PATH={path} …",
        kubernetes="env LD_LIBRARY_PATH: {path}",
    ),
)
def compat_library(context: CheckContext) -> Finding:
    """Looks for a `compat` folder with a libcuda on LD_LIBRARY_PATH."""
    if not context.has_nvidia:
        return skipped(NO_GPU)
    folders = [word for word in context.environ.get("LD_LIBRARY_PATH", "").split(":") if word]
    found = [
        folder
        for folder in folders
        if folder.rstrip("/").endswith("compat")
        and any(name.startswith("libcuda.so") for name in context.files.names(folder))
    ]
    if not found:
        return passed("none on LD_LIBRARY_PATH")
    rest = ":".join(folder for folder in folders if folder not in found)
    return warned(f"{listing(found)} on LD_LIBRARY_PATH", values={"path": rest or "''"})


CHECKS = (nvml_starts, driver_version, module_version, compat_library)
