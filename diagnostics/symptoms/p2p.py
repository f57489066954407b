"""Copies between GPUs: peer access, the IOMMU, NVLink multicast."""

from typing import Final

from vcli.diagnostics.symptoms.progress import HANGS, SERVES
from vcli.diagnostics.symptoms.symptom import Sign, Symptom

P2P: Final = (
    Symptom(
        name="no-peer-access",
        title="these GPUs cannot read each other's memory",
        signs=(Sign("peer access is not supported between these two devices"),),
        cause="the custom all-reduce needs P2P, which this pair of GPUs, or the container, lacks",
        remedy="--disable-custom-all-reduce; vcli measures it and takes NCCL by itself",
        check="LINK-01",
        reports="sglang #1509",
    ),
    Symptom(
        name="p2p-by-name",
        title="the launcher refuses P2P by the GPU's name",
        signs=(Sign("Using RTX ", r"NotImplementedError: Using RTX .* doesn't support faster"),),
        cause="accelerate judges by the name of the GPU, not by a measurement",
        remedy="NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1, or accelerate launch, which sets both; with "
        "an NVLink bridge measure first: vcli doctor link",
        check="LINK-01",
        reports="accelerate #2328",
    ),
    Symptom(
        name="p2p-probe-stuck",
        title="the probe of P2P between the GPUs does not come back",
        signs=(Sign("generating GPU P2P access cache in "),),
        ended_by=(
            *SERVES,
            Sign("reading GPU P2P access cache"),
            Sign("Starting to load model"),
            Sign("Loading safetensors checkpoint shards"),
            Sign("model weights take"),
            Sign("Model loading took"),
            Sign("Custom allreduce is disabled"),
        ),
        cause="a copy between two GPUs hangs, although the driver says that it is possible; the "
        "probe has no deadline",
        remedy="--disable-custom-all-reduce and NCCL_P2P_DISABLE=1 go without P2P; to have it: "
        "iommu=pt or IOMMU and ACS off in the BIOS",
        check="LINK-06",
        reports="vllm #8735, #6895",
    ),
    Symptom(
        name="p2p-data-lost",
        title="copies between GPUs are lost",
        signs=(
            Sign("No available shared memory broadcast block"),
            Sign("Watchdog caught collective operation timeout"),
        ),
        also=(
            (
                Sign("P2P", r"(?i)\b(?:p2p|peer)\b.*(?<![\d.])0\.0(?![\d.])"),
                Sign("p2p", r"(?i)\b(?:p2p|peer)\b.*(?<![\d.])0\.0(?![\d.])"),
                Sign("peer", r"(?i)\b(?:p2p|peer)\b.*(?<![\d.])0\.0(?![\d.])"),
                Sign("did not arrive"),
            ),
        ),
        cause="the driver offers P2P, but what one GPU writes never reaches the other: the bridge "
        "(ACS) sends it to the IOMMU, which drops it",
        remedy="iommu=pt or intel_iommu=off / amd_iommu=off on the kernel's command line, ACS off "
        "in the BIOS; until then NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce",
        check="LINK-06",
        reports="vllm #51513, PR #47544",
    ),
    Symptom(
        name="iommu",
        title="the IOMMU is in the way of copies between GPUs",
        signs=(
            Sign("DMAR: [DMA ", r"DMAR: \[DMA (?:Read|Write).*\] Request device .*fault addr"),
            Sign("AMD-Vi: Event logged [IO_PAGE_FAULT"),
        ),
        cause="the IOMMU refused accesses of a device: copies between GPUs hang or arrive wrong, "
        "without any error",
        remedy="iommu=pt or intel_iommu=off / amd_iommu=off on the kernel's command line, ACS off "
        "in the BIOS; until then NCCL_P2P_DISABLE=1",
        check="LINK-06",
        reports="nccl #257, pytorch #84803",
    ),
    Symptom(
        name="iommu-hang",
        title="collectives hang on a machine with the IOMMU on",
        signs=HANGS,
        also=((Sign("intel_iommu=on"), Sign("amd_iommu=on")),),
        ended_by=SERVES,
        cause="with the IOMMU translating, writes between GPUs may never arrive",
        remedy="intel_iommu=off or iommu=pt on the kernel's command line; NCCL_P2P_DISABLE=1 tells "
        "whether that is it",
        check="LINK-06",
        reports="nccl #257",
    ),
    Symptom(
        name="nvls",
        title="NVLink multicast (NVLS) does not work",
        signs=(
            Sign("nvls.cc:", r"nvls\.cc:\d+ NCCL WARN Cuda failure"),
            Sign("the operation cannot be performed in the present state", r"[Cc]uda failure 401"),
        ),
        cause="the NVSwitch fabric refuses multicast objects, while all else on the GPUs works",
        remedy="NCCL_NVLS_ENABLE=0 goes without; to mend it restart the fabric manager or reboot",
        check="LINK-08",
        reports="nccl #1788, pytorch PR #177472",
    ),
    Symptom(
        name="mnnvl-workspace",
        title="the all-reduce workspace waits for NVLink between nodes that is not there",
        signs=(Sign("[fd_exchange] timed out connecting"),),
        cause="the nodes are linked by InfiniBand alone, and each attempt to share memory over "
        "NVLink waits 30 s and leaks some",
        remedy="vLLM: VLLM_ALLREDUCE_USE_FLASHINFER=0",
        reports="vllm #51986",
    ),
)
