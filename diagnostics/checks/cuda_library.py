"""CUDA, LINK: what libcuda itself says, asked in a child of its own."""

from typing import Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.checks.cuda import NO_GPU
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.cuda_driver import DEADLINE_S, NO_LIBRARY
from vcli.diagnostics.text import listing, plural

_CODES: Final = {
    100: "no device",
    101: "invalid device",
    304: "the operating system refused a call",
    802: "the system is not ready yet: the fabric manager does not run",
    803: "driver and libcuda are of different versions",
    804: "a compat libcuda on a GPU that does not allow it",
    999: "unknown error, often after the module was loaded anew or without /dev/nvidia-uvm",
}
_REMEDIES: Final = {
    802: "sudo systemctl restart nvidia-fabricmanager   (LINK-07)",
    803: "reboot, or use the libcuda of the driver that is loaded   (CUDA-03)",
    804: "take the compat folder off LD_LIBRARY_PATH   (CUDA-04)",
}
#: Value of NCCL_NVLS_ENABLE that insists; 2, the default, lets NCCL find out.
_FORCED: Final = "1"
_SWITCHES: Final = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@check(
    "CUDA-07",
    "CUDA starts",
    level=Level.L3,
    why="NVML may answer where no process can use a GPU",
    expected="cuInit comes back without an error and shows a device",
    remedy=Remedy(bare_metal="sudo nvidia-smi; sudo modprobe nvidia-uvm; then vcli doctor cuda-07"),
    requires=("CUDA-01",),
    deadline_s=DEADLINE_S + 2,
    is_headline=True,
)
def cuda_starts(context: CheckContext) -> Finding:
    """Calls cuInit and counts the devices in a child process, which is killed if it hangs.

    No context is made on any device.
    """
    answer = context.ask_cuda()
    if answer.code == NO_LIBRARY:
        return failed(
            "libcuda.so.1 is not found",
            remedy="install the driver's libcuda, or run the container with --gpus all",
        )
    if answer.code:
        text = _CODES.get(answer.code, "see cuda.h")
        return failed(
            f"cuInit gives error {answer.code}: {text}", remedy=_REMEDIES.get(answer.code, "")
        )
    if not answer.multicast:
        return failed("cuInit succeeds and shows no device", remedy="unset CUDA_VISIBLE_DEVICES")
    return passed(f"cuInit shows {plural(len(answer.multicast), 'device')}")


@check(
    "LINK-08",
    "NVLink multicast (NVLS)",
    level=Level.L1,
    why="NCCL told to use what the GPUs do not have ends the start with an error",
    expected="no variable that forces it where the GPUs lack it, and GPUs that agree",
    remedy=Remedy(bare_metal="export NCCL_NVLS_ENABLE=0"),
    requires=("CUDA-01",),
    deadline_s=DEADLINE_S + 2,
)
def multicast(context: CheckContext) -> Finding:
    """Reads the devices' attribute, and the variables that switch multicast on or off.

    Nothing is created: where the fabric does not allow it, an attempt can put the GPUs of a host
    out of service. Where a variable switches it off, the driver is not even asked.
    """
    if len(context.host.gpus) < 2:
        return skipped("one GPU" if context.host.gpus else NO_GPU)
    for name, value in _SWITCHES.items():
        if context.environ.get(name, "").strip() == value:
            return passed(f"switched off by {name}={value}")
    answer = context.ask_cuda()
    if answer.code or not answer.multicast:
        return skipped("CUDA does not start, see vcli doctor cuda-07")
    lacking = [f"GPU {index}" for index, has_it in enumerate(answer.multicast) if not has_it]
    is_forced = context.environ.get("NCCL_NVLS_ENABLE", "").strip() == _FORCED
    if is_forced and lacking:
        return failed(f"NCCL_NVLS_ENABLE=1, and {listing(lacking)} lack it")
    if lacking and len(lacking) < len(answer.multicast):
        return warned(f"{listing(lacking)} lack it, the others have it")
    return passed("no GPU has it" if lacking else "every GPU has it (not tried)")


CHECKS = (cuda_starts, multicast)
