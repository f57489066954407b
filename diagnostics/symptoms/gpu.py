"""GPUs: driver, visibility, memory."""

from typing import Final

from vcli.diagnostics.symptoms.progress import HANGS, SERVES
from vcli.diagnostics.symptoms.symptom import Sign, Symptom

_TOO_WEAK: Final = Sign(
    "is not supported for the current GPU",
    r"is not supported for the current GPU\. Min(?:imum)? capability: (?P<need>\d+)",
)

GPU: Final = (
    Symptom(
        name="cuda-after-fork",
        title="CUDA was used before the process forked",
        signs=(Sign("Cannot re-initialize CUDA in forked subprocess"),),
        cause="a process touched CUDA (a tensor on the GPU, torch.cuda.is_available or a device "
        "query at import) and was then forked; its children cannot use CUDA",
        remedy="start workers by spawn: VLLM_WORKER_MULTIPROCESSING_METHOD=spawn and the call "
        "under if __name__ == '__main__'; vcli: --start-method spawn",
        check="PROC-02",
        reports="vllm #7151, #8893, #12754",
    ),
    Symptom(
        name="visible-devices-uuid",
        title="CUDA_VISIBLE_DEVICES names a device by its UUID",
        signs=(Sign("invalid literal for int()", r"with base 10: '(?P<uuid>(?:MIG|GPU)-[^']+)'"),),
        cause="the engine reads CUDA_VISIBLE_DEVICES as numbers and got {uuid}",
        remedy="name the device by its number (nvidia-smi -L lists both); a MIG slice needs an "
        "engine that takes UUIDs",
        check="CUDA-06",
        reports="vllm #41848, #13815",
    ),
    Symptom(
        name="fabric-manager",
        title="the NVSwitch fabric is not up",
        signs=(
            Sign("system not yet initialized", r"(?:Error|failure) 802\b"),
            Sign("CUDA_ERROR_SYSTEM_NOT_READY"),
        ),
        cause="the fabric manager does not run, or its version is not the driver's",
        remedy="systemctl status nvidia-fabricmanager; install the version of the driver "
        "(nvidia-smi shows it) and start it; containers: on the host",
        check="LINK-07",
        reports="pytorch #35710, dstack #2348",
    ),
    Symptom(
        name="compat-library",
        title="the CUDA library and the driver do not fit together",
        signs=(Sign("unsupported display driver / cuda driver combination", r"Error 803\b"),),
        cause="a libcuda of another version comes before the driver's own, often a compat folder "
        "in LD_LIBRARY_PATH or /etc/ld.so.conf.d",
        remedy="take the compat folder out (ldconfig -p | grep libcuda shows which is found), or "
        "reboot after a driver upgrade",
        check="CUDA-04",
        reports="gpustack #4678",
    ),
    Symptom(
        name="forward-compatibility",
        title="the driver is too old for this CUDA, and forward compatibility is not for this GPU",
        signs=(Sign("forward compatibility was attempted on non supported HW"),),
        cause="the image brings a compat libcuda for an older driver; that works on data-center "
        "GPUs alone",
        remedy="upgrade the host's driver, or use an image with the driver's CUDA (nvidia-smi "
        "shows it)",
        check="CUDA-02",
        reports="vllm #4940",
    ),
    Symptom(
        name="driver-too-old",
        title="the driver is too old",
        signs=(
            Sign("CUDA driver version is insufficient for CUDA runtime version"),
            Sign("driver on your system is too old", r"RuntimeError: .*too old \(found"),
        ),
        cause="torch was built for a newer CUDA than this driver knows",
        remedy="upgrade the driver, or install torch for the CUDA version that nvidia-smi shows",
        check="CUDA-02",
    ),
    Symptom(
        name="driver-mismatch",
        title="kernel module and driver library differ",
        signs=(Sign("Driver/library version mismatch"),),
        cause="the driver was upgraded, and the old kernel module is still loaded",
        remedy="reboot, or unload the nvidia modules; containers: start them again",
        check="CUDA-03",
    ),
    Symptom(
        name="no-gpu",
        title="no GPU can be seen",
        signs=(
            Sign("No CUDA GPUs are available", r"RuntimeError: No CUDA GPUs are available"),
            Sign("Found no NVIDIA driver", r"RuntimeError: Found no NVIDIA driver"),
            Sign("no CUDA-capable device is detected", r"[Ee]rror.*no CUDA-capable device"),
            Sign("Failed to infer device type", r"RuntimeError: Failed to infer device type"),
        ),
        cause="the process sees no GPU: none was given to the container, CUDA_VISIBLE_DEVICES is "
        "empty, or the driver is not loaded",
        remedy="nvidia-smi in the same place; docker run --gpus all; Kubernetes: "
        "resources.limits nvidia.com/gpu; Slurm: --gres=gpu:N",
        check="CUDA-01",
    ),
    Symptom(
        name="torch-without-cuda",
        title="torch was built without CUDA",
        signs=(Sign("Torch not compiled with CUDA enabled"),),
        cause="the CPU build of torch is installed",
        remedy="install torch from its CUDA index, in the version that nvidia-smi allows",
        check="PY-03",
    ),
    Symptom(
        name="no-kernel-image",
        title="torch has no code for this GPU",
        signs=(Sign("no kernel image is available for execution on the device"),),
        cause="torch, or a kernel library, was built for other compute capabilities",
        remedy="install a build that names this GPU's capability (torch.cuda.get_arch_list())",
        check="PY-03",
    ),
    Symptom(
        name="device-busy",
        title="the GPU lets only one process in",
        signs=(Sign("all CUDA-capable devices are busy or unavailable"),),
        cause="exclusive or prohibited compute mode, or a GPU that needs a reset",
        remedy="nvidia-smi -c 0 sets the default mode; nvidia-smi -q -d COMPUTE shows it",
        check="CUDA-09",
    ),
    Symptom(
        name="mixed-gpus",
        title="different GPUs in one group",
        signs=(_TOO_WEAK, *HANGS),
        also=((Sign("Detected different devices in the system: ", r"system: (?P<gpus>.+?)\. "),),),
        ended_by=SERVES,
        cause="the machine mixes {gpus}; the engine asks one of them what all can do, and NCCL "
        "may hang between generations",
        remedy="use GPUs of one kind: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=<those>; "
        "if both are needed, NCCL_P2P_DISABLE=1 or pipeline instead of tensor parallelism",
        check="GPU-02",
        reports="vllm #20282, #28572",
    ),
    Symptom(
        name="gpu-too-weak",
        title="the GPU cannot compute in the model's type",
        signs=(
            _TOO_WEAK,
            Sign("only supported on GPUs with compute capability", r"ValueError: Bfloat16 is only"),
        ),
        cause="the quantization or number type of the model needs a newer GPU",
        remedy="--dtype float16, another quantization, or another GPU",
        check="FIT-06",
    ),
    Symptom(
        name="memory-error",
        title="the GPU's memory has an uncorrectable error",
        signs=(Sign("uncorrectable ECC error encountered"),),
        cause="a fault of the GPU's memory; everything on this GPU is lost",
        remedy="nvidia-smi -q -d ECC,ROW_REMAPPER; drain the node and reset the GPU; replace it "
        "if that comes again",
        check="GPU-04",
        reports="sglang #3204, pytorch #113128",
    ),
    Symptom(
        name="xid",
        title="the driver reported a fault of a GPU",
        signs=(
            Sign("NVRM: Xid", r"Xid \(PCI:(?P<device>[^)]+)\): (?P<xid>\d+)"),
            Sign("GPU has fallen off the bus"),
        ),
        cause="Xid {xid} of the GPU at {device}: hardware, driver or power; errors of the program "
        "after it follow from it",
        remedy="look Xid {xid} up in NVIDIA's catalogue; drain the node and reset the GPU",
        check="GPU-06",
    ),
    Symptom(
        name="gpu-held",
        title="another process holds memory of the GPU",
        signs=(
            Sign(
                "is less than desired GPU memory utilization",
                r"Free memory on device.* \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)",
            ),
            Sign(
                "The memory capacity is unbalanced",
                r"(?:Error|Exception): The memory capacity is unb",
            ),
            Sign("Error in memory profiling.", r"Initial free memory"),
        ),
        cause="less memory is free on one GPU than the engine was told to take: another process, "
        "or a left-over one, is on it",
        remedy="nvidia-smi names the processes; stop them (vcli doctor gpu-03 names them with "
        "their user), or lower --gpu-memory-utilization / --mem-fraction-static",
        check="GPU-03",
        reports="vllm #20305, sglang #4233",
    ),
    Symptom(
        name="gpu-out-of-memory",
        title="the GPU's memory is full",
        signs=(
            Sign(
                "CUDA out of memory",
                r"CUDA out of memory(?:\. Tried| occurred)|Error: CUDA out of memory\.?\s*$",
            ),
            Sign("No available memory for the cache blocks"),
            Sign("Not enough memory. Please try to increase --mem-fraction-static"),
            Sign("KV cache is needed, which is larger than"),
            Sign("maximum number of tokens that can be stored in KV cache"),
            Sign(
                "out of memory",
                r"Cuda failure (?:2 )?'out of memory'|Error: CUDA error: out of memory\b",
            ),
        ),
        cause="weights, cache and activations need more than the GPU has free",
        remedy="vcli doctor --model MODEL -tp N shows the bytes; more ranks (-tp), a shorter "
        "--max-model-len, fewer --max-num-seqs, or a lower --gpu-memory-utilization",
        check="FIT-05",
    ),
    Symptom(
        name="duplicate-gpu",
        title="two ranks use one GPU",
        signs=(
            Sign(
                "Duplicate GPU detected",
                r"rank (?P<first>\d+) and rank (?P<second>\d+) both on CUDA device (?P<device>\w+)",
            ),
        ),
        cause="ranks {first} and {second} are on one GPU ({device}): more ranks than GPUs on this "
        "node, or each rank left torch.cuda.set_device out",
        remedy="ranks per node <= GPUs per node; torch.cuda.set_device(LOCAL_RANK) before "
        "init_process_group",
        check="GPU-01",
        reports="nccl #1241, horovod #3929",
    ),
    Symptom(
        name="too-few-gpus",
        title="more ranks than GPUs on this node",
        signs=(
            Sign(
                "is larger than the number of available GPUs",
                r"size \((?P<ranks>\d+)\) is larger than the number of available GPUs "
                r"\((?P<gpus>\d+)\)",
            ),
            Sign("invalid device ordinal", r"CUDA error: invalid device ordinal"),
        ),
        cause="the sizes need more GPUs than this node has, and the engine was not told of others",
        remedy="lower -tp/-pp, or name the nodes: --nnodes in vcli and vLLM, or "
        "--distributed-executor-backend ray in vLLM",
        check="GPU-01",
        reports="vllm #15217, #29447",
    ),
)
