"""CUDA, GPU and LINK checks through a stand-in for NVML and trees of device files."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.diagnostics.test_host_checks import WITH_MODEL
from tests.support.check_cases import Case, check_case
from tests.support.fake_host import HEALTHY_HOST, FakePackages
from tests.support.fake_nvml import FakeGpu, FakeNvml, gpu_facts
from vcli.diagnostics import Dialect, Status
from vcli.diagnostics.cuda_driver import CudaAnswer
from vcli.diagnostics.packages import TorchBuild
from vcli.topology import LinkFacts

PASS, WARN, FAIL, SKIP, UNKNOWN = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.UNKNOWN
GIB = 1024**3


def nvml(*gpus: FakeGpu, **more: Any) -> Mapping[str, Any]:
    return {"nvml_module": FakeNvml(gpus), "device_type": "cuda", "pause": lambda s: None, **more}


def answering(**answers: Any) -> Mapping[str, Any]:
    """One healthy GPU and one that answers like this."""
    return nvml(FakeGpu(answers={k: _healthy(k, v) for k, v in answers.items()}),
                FakeGpu(answers=answers))  # fmt: skip


def _healthy(name: str, value: Any) -> Any:
    return {"PersistenceMode": 1, "RemappedRows": (0, 0, 0, 0)}.get(name, 0)


TWO = {"host": {"gpus": gpu_facts(2), "driver_version": "580.95"}, "config": {"tp": 2}}
CUDA13 = FakePackages(torch=TorchBuild(version="2.13.0+cu130", cuda="13.0", hip=None))
NODES = {"dev/nvidiactl": "x", "dev/nvidia-uvm": "x", "dev/nvidia0": "x"}
KMSG = "6,1,1,-;NVRM: Xid (PCI:0000:03:00): {}, pid=1, name=python\n"


def links(kind: str | dict[tuple[int, int], str], count: int) -> tuple[LinkFacts, ...]:
    return tuple(
        LinkFacts(
            first=a,
            second=b,
            kind=kind if isinstance(kind, str) else kind.get((a, b), "SYS"),
            can_access_peer=True,
        )
        for a in range(count)
        for b in range(a + 1, count)
    )


CUDA_CASES = [
    Case(id="CUDA-01", status=SKIP, says="no NVIDIA GPU"),
    Case(id="CUDA-01", status=PASS, says="driver 580.95", more=nvml(FakeGpu()), **TWO),
    *(
        Case(
            id="CUDA-01",
            status=FAIL,
            says=f"code {code}",
            remedy=remedy,
            more={"nvml_module": FakeNvml(init_error=code), "device_type": "cuda"},
        )
        for code, remedy in ((12, "driver"), (9, "modprobe nvidia"), (18, "reboot"), (4, "usermod"))
    ),
    Case(
        id="CUDA-01",
        status=FAIL,
        remedy="docker run --gpus all",
        more={
            "nvml_module": FakeNvml(init_error=9),
            "device_type": "cuda",
            "dialect": Dialect.DOCKER,
        },
    ),
    Case(
        id="CUDA-01",
        status=UNKNOWN,
        says="nvidia-ml-py is not installed",
        remedy="pip install nvidia-ml-py",
        more={"nvml_module": "absent", "device_type": "cuda"},
    ),
    Case(id="CUDA-02", status=PASS, more={"packages": CUDA13}, **TWO),
    Case(
        id="CUDA-02",
        status=FAIL,
        says="needs 580.65 or newer",
        remedy="CUDA 12.6",
        host={"driver_version": "550.54.15"},
        more={"packages": CUDA13},
    ),
    Case(
        id="CUDA-03",
        status=FAIL,
        says="kernel module 550.54.15, library 580.95",
        remedy="reboot",
        files={
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64"
            "  550.54.15  Release Build\n"
        },
        **TWO,
    ),
    Case(
        id="CUDA-03",
        status=PASS,
        files={"proc/driver/nvidia/version": "NVRM version: x Kernel Module  580.95  Tue\n"},
        **TWO,
    ),
    Case(id="CUDA-04", status=PASS, **TWO),
    Case(
        id="CUDA-04",
        status=WARN,
        says="/usr/local/cuda/compat",
        remedy="export LD_LIBRARY_PATH=/opt/lib",
        files={"usr/local/cuda/compat/libcuda.so.1": "x"},
        environ={"LD_LIBRARY_PATH": "/usr/local/cuda/compat:/opt/lib"},
        **TWO,
    ),
    Case(id="CUDA-05", status=SKIP, says="no NVIDIA GPU"),
    Case(id="CUDA-05", status=PASS, says="1 node", files=NODES),
    Case(id="CUDA-05", status=FAIL, says="/dev/nvidia-uvm is missing",
         files={**NODES, "dev/nvidia-uvm": ""}),
    Case(id="CUDA-05", status=FAIL, says="no /dev/nvidia*", more={"device_type": "cuda"}),
    Case(id="CUDA-06", status=PASS, says="not set", more=nvml(FakeGpu(), FakeGpu()), **TWO),
    Case(
        id="CUDA-06",
        status=PASS,
        says="0=0000:01:00.0",
        environ={"CUDA_VISIBLE_DEVICES": "1,0"},
        more=nvml(FakeGpu(), FakeGpu()),
        **TWO,
    ),
    Case(
        id="CUDA-06",
        status=FAIL,
        says="names 0 twice",
        remedy="export CUDA_VISIBLE_DEVICES=0,1",
        environ={"CUDA_VISIBLE_DEVICES": "0,0"},
        more=nvml(FakeGpu(), FakeGpu()),
        **TWO,
    ),
    Case(
        id="CUDA-06",
        status=FAIL,
        says="7 is unknown",
        environ={"CUDA_VISIBLE_DEVICES": "0,7"},
        host={"gpus": gpu_facts(1)},
        more=nvml(FakeGpu(), FakeGpu()),
    ),
    Case(
        id="CUDA-06",
        status=FAIL,
        says="shows 1 GPU for 2 ranks",
        environ={"CUDA_VISIBLE_DEVICES": "0"},
        host={"gpus": gpu_facts(1)},
        config={"tp": 2},
        more=nvml(FakeGpu(), FakeGpu()),
    ),
    Case(
        id="CUDA-06",
        status=WARN,
        remedy="CUDA_DEVICE_ORDER=PCI_BUS_ID",
        environ={"CUDA_VISIBLE_DEVICES": "0,1"},
        host={"gpus": gpu_facts(2, name=["A", "B"])},
        more=nvml(FakeGpu(), FakeGpu()),
    ),
    Case(id="CUDA-08", status=PASS, says="off", more=nvml(FakeGpu()), **TWO),
    Case(
        id="CUDA-08",
        status=FAIL,
        says="MIG is on for GPU 1",
        host={"gpus": gpu_facts(2, is_mig=[False, True])},
        config={"tp": 2},
        more=nvml(FakeGpu()),
    ),
    Case(id="CUDA-09", status=PASS, more=answering(ComputeMode=0), **TWO),
    Case(id="CUDA-09", status=FAIL, says="GPU 1 is PROHIBITED", remedy="nvidia-smi -i 1 -c 0",
         more=answering(ComputeMode=2), **TWO),
    Case(id="CUDA-09", status=WARN, says="EXCLUSIVE_PROCESS", more=answering(ComputeMode=3), **TWO),
    Case(id="CUDA-11", status=SKIP),
    Case(id="CUDA-11", status=WARN, says="missing", files={**NODES, "dev/nvidia-nvswitch0": "x"}),
    Case(id="CUDA-11", status=PASS, says="not needed", environ={"NCCL_NVLS_ENABLE": "0"},
         files={**NODES, "dev/nvidia-nvswitch0": "x"}),
    Case(id="CUDA-11", status=PASS,
         files={**NODES, "dev/nvidia-nvswitch0": "x", "dev/nvidia-caps/nvidia-cap1": "x"}),
]  # fmt: skip

GPU_CASES = [
    Case(id="GPU-01", status=SKIP),
    Case(id="GPU-01", status=PASS, says="2 GPUs for 2 ranks", more={"device_type": "cuda"}, **TWO),
    Case(
        id="GPU-01",
        status=FAIL,
        says="2 GPUs for 4 ranks",
        remedy="-tp 2, or --nnodes 2",
        host={"gpus": gpu_facts(2)},
        config={"tp": 4},
        more={"device_type": "cuda"},
    ),
    Case(
        id="GPU-01",
        status=FAIL,
        says="0 GPUs for 1 rank (NVML: driver not loaded)",
        more={"device_type": "cuda", "gpu_problem": "NVML: driver not loaded"},
    ),
    Case(id="GPU-02", status=PASS, says="2× NVIDIA H100", more={"device_type": "cuda"}, **TWO),
    Case(
        id="GPU-02",
        status=FAIL,
        says="compute capabilities 8.0, 9.0",
        remedy="CUDA_VISIBLE_DEVICES=1,2",
        host={
            "gpus": gpu_facts(
                3,
                name=["NVIDIA A100", "NVIDIA H100", "NVIDIA H100"],
                compute_capability=[(8, 0), (9, 0), (9, 0)],
            )
        },
        config={"tp": 3},
        more={"device_type": "cuda"},
    ),
    Case(
        id="GPU-02",
        status=WARN,
        says="40.0 GiB to 80.0 GiB",
        host={"gpus": gpu_facts(2, memory_total_bytes=[80 * GIB, 40 * GIB])},
        config={"tp": 2},
        more={"device_type": "cuda"},
    ),
    Case(id="GPU-03", status=PASS, says="79.0 GiB free on each", more=nvml(FakeGpu()), **TWO),
    Case(
        id="GPU-03",
        status=FAIL,
        says="GPU 0 has 4.0 GiB free, 17.0 GiB needed; held by pid 4242 'VLLM::Worker_TP0' (user ",
        remedy="kill 4242, or choose others: CUDA_VISIBLE_DEVICES=1",
        host={"gpus": gpu_facts(2, memory_free_bytes=[4 * GIB, 79 * GIB])},
        files={
            "proc/4242/cmdline": "VLLM::Worker_TP0",
            "proc/4242/status": "Name:\tx\nUid:\t0\t0\t0\t0\n",
            "proc/uptime": "10000.0 1.0",
            "proc/4242/stat": "4242 (VLLM) S 1 " + "0 " * 17 + "100 0",
        },
        more={
            **nvml(FakeGpu(answers={"ComputeRunningProcesses": [SimpleNamespace(pid=4242)]})),
            **WITH_MODEL,
        },
    ),
    Case(
        id="GPU-03",
        status=WARN,
        says="pid 77 (in another container)",
        host={"gpus": gpu_facts(1, memory_free_bytes=40 * GIB)},
        more=nvml(FakeGpu(answers={"ComputeRunningProcesses": [SimpleNamespace(pid=77)]})),
    ),
    Case(
        id="GPU-03",
        status=WARN,
        says="GPU 0 has 76.0 GiB free",
        host={"gpus": gpu_facts(1, memory_free_bytes=76 * GIB)},
        more=nvml(FakeGpu()),
    ),
    Case(id="GPU-04", status=PASS, more=answering(TotalEccErrors=0), **TWO),
    Case(id="GPU-04", status=FAIL, says="GPU 1: 3 uncorrected", remedy="CUDA_VISIBLE_DEVICES=0",
         more=answering(TotalEccErrors=3), **TWO),
    Case(id="GPU-04", status=SKIP, says="do not tell", more=nvml(FakeGpu(), FakeGpu()), **TWO),
    Case(id="GPU-05", status=PASS, more=answering(RemappedRows=(5, 0, 0, 0)), **TWO),
    Case(id="GPU-05", status=WARN, says="waits for a reset",
         more=answering(RemappedRows=(0, 1, 1, 0)), **TWO),
    Case(id="GPU-05", status=FAIL, says="replace the board",
         more=answering(RemappedRows=(0, 1, 0, 1)), **TWO),
    Case(id="GPU-05", status=WARN, says="retired", more=answering(RetiredPagesPendingStatus=1),
         **TWO),
    Case(id="GPU-06", status=PASS, says="none", files={"dev/kmsg": "6,1,1,-;usb 1-1: new\n"}),
    Case(id="GPU-06", status=FAIL, says="Xid 79 at 0000:03:00",
         files={"dev/kmsg": KMSG.format(79)}),
    Case(id="GPU-06", status=WARN, says="Xid 31", files={"dev/kmsg": KMSG.format(31)}),
    Case(id="GPU-06", status=UNKNOWN, says="/dev/kmsg cannot be read"),
    Case(id="GPU-06", status=SKIP, says="on the host: sudo dmesg",
         more={"dialect": Dialect.DOCKER}),
    Case(id="GPU-07", status=PASS, says="2 of 2", more=answering(Temperature=40), **TWO),
    Case(id="GPU-07", status=FAIL, says="GPU 1 (0000:02:00.0) has fallen off the bus",
         remedy="reboot", more=nvml(FakeGpu(), FakeGpu(error=15)), **TWO),
    Case(id="GPU-07", status=FAIL, says="must be reset", remedy="nvidia-smi -i 1 --gpu-reset",
         more=nvml(FakeGpu(), FakeGpu(error=16)), **TWO),
    Case(id="GPU-08", status=PASS, more=answering(CurrentClocksEventReasons=0x4 | 0x1), **TWO),
    Case(id="GPU-08", status=FAIL, says="power brake",
         more=answering(CurrentClocksEventReasons=0x80), **TWO),
    Case(id="GPU-08", status=WARN, says="too warm",
         more=answering(CurrentClocksThrottleReasons=0x20), **TWO),
    Case(id="GPU-10", status=PASS, more=nvml(FakeGpu(answers={"PcieReplayCounter": [7]})),
         host={"gpus": gpu_facts(1)}),
    Case(id="GPU-10", status=WARN, says="GPU 0: 5 replays",
         more=nvml(FakeGpu(answers={"PcieReplayCounter": [7, 12]})), host={"gpus": gpu_facts(1)}),
    Case(id="GPU-11", status=PASS, more=answering(PersistenceMode=1), **TWO),
    Case(id="GPU-11", status=WARN, says="GPU 1: persistence mode is off",
         more=answering(PersistenceMode=0), **TWO),
]  # fmt: skip

SOCKETS = {(0, 1): "PIX", (2, 3): "PIX"}


def cuda(code: int, *multicast: bool) -> Mapping[str, Any]:
    return nvml(FakeGpu(), FakeGpu(), ask_cuda=lambda: CudaAnswer(code=code, multicast=multicast))


CUDA_LIBRARY_CASES = [
    Case(id="CUDA-07", status=PASS, says="2 devices", more=cuda(0, True, True), **TWO),
    Case(
        id="CUDA-07", status=FAIL, says="error 802", remedy="fabricmanager", more=cuda(802), **TWO
    ),
    Case(id="CUDA-07", status=FAIL, says="error 42", remedy="nvidia-smi", more=cuda(42), **TWO),
    Case(id="CUDA-07", status=FAIL, says="no device", more=cuda(0), **TWO),
    Case(id="CUDA-07", status=FAIL, says="libcuda.so.1", remedy="--gpus all", more=cuda(-1), **TWO),
    Case(id="LINK-08", status=SKIP, says="no NVIDIA GPU"),
    Case(id="LINK-08", status=SKIP, says="CUDA does not start", more=cuda(999), **TWO),
    Case(id="LINK-08", status=PASS, says="every GPU has it", more=cuda(0, True, True), **TWO),
    Case(id="LINK-08", status=PASS, says="no GPU has it", more=cuda(0, False, False), **TWO),
    Case(id="LINK-08", status=WARN, says="GPU 1 lack it", more=cuda(0, True, False), **TWO),
    Case(
        id="LINK-08",
        status=FAIL,
        says="NCCL_NVLS_ENABLE=1, and GPU 0, GPU 1 lack it",
        remedy="NCCL_NVLS_ENABLE=0",
        environ={"NCCL_NVLS_ENABLE": "1"},
        more=cuda(0, False, False),
        **TWO,
    ),
]

LINK_CASES = [
    Case(id="LINK-01", status=SKIP),
    Case(id="LINK-01", status=PASS, says="1 pair OK", more=nvml(FakeGpu(), FakeGpu()), **TWO),
    Case(id="LINK-01", status=WARN, says="1 of 1 pair not OK: 0-1 CNS",
         more=nvml(FakeGpu(p2p={1: 1}), FakeGpu()), **TWO),
    Case(id="LINK-03", status=PASS, says="3 links up",
         more=nvml(FakeGpu(links=[1, 1, 1]), FakeGpu(links=[1, 1, 1])), **TWO),
    Case(id="LINK-03", status=FAIL, says="GPU 1 has 2 of 3 links up",
         more=nvml(FakeGpu(links=[1, 1, 1]), FakeGpu(links=[1, 0, 1])), **TWO),
    Case(id="LINK-03", status=SKIP, says="no NVLink", more=nvml(FakeGpu(), FakeGpu()), **TWO),
    Case(id="LINK-04", status=PASS, more=nvml(FakeGpu(link_errors={0: [4]}), FakeGpu()), **TWO),
    Case(id="LINK-04", status=WARN, says="GPU 0 link 2",
         more=nvml(FakeGpu(link_errors={2: [4, 9]}), FakeGpu()), **TWO),
    Case(id="LINK-05", status=PASS, says="PIX",
         host={"gpus": gpu_facts(2), "links": links("PIX", 2)},
         config={"tp": 2}, more={"device_type": "cuda"}),
    Case(
        id="LINK-05",
        status=WARN,
        says="SYS between 0-1",
        remedy="CUDA_VISIBLE_DEVICES=0,3",
        host={"gpus": gpu_facts(4), "links": links({(0, 3): "PIX", (1, 2): "PIX"}, 4)},
        config={"tp": 2},
        more={"device_type": "cuda"},
    ),
    Case(id="LINK-05", status=PASS, says="no nearer choice",
         host={"gpus": gpu_facts(2), "links": links("SYS", 2)}, config={"tp": 2},
         more={"device_type": "cuda"}),
    Case(id="LINK-06", status=SKIP, says="no two GPUs"),
    Case(id="LINK-06", status=WARN, says="GPU 0 (DMA-FQ)", remedy="iommu=pt",
         host={"gpus": gpu_facts(2), "links": links("PHB", 2)},
         files={"sys/bus/pci/devices/0000:01:00.0/iommu_group/type": "DMA-FQ\n"}),
    Case(id="LINK-06", status=PASS, host={"gpus": gpu_facts(2), "links": links("PHB", 2)},
         files={"sys/bus/pci/devices/0000:01:00.0/iommu_group/type": "identity\n"}),
    Case(id="LINK-06", status=SKIP, says="NVLink",
         host={"gpus": gpu_facts(2), "links": links("NV18", 2)}),
    Case(id="LINK-07", status=SKIP, more=nvml(FakeGpu(), FakeGpu()), **TWO),
    Case(id="LINK-07", status=FAIL, says="GPU 1: in progress", remedy="nvidia-fabricmanager",
         more=nvml(FakeGpu(fabric_state=3), FakeGpu(fabric_state=2)), **TWO),
    Case(id="LINK-07", status=PASS, says="completed",
         more=nvml(FakeGpu(fabric_state=3), FakeGpu(fabric_state=3)), **TWO),
    Case(id="LINK-09", status=SKIP),
    Case(id="LINK-09", status=PASS, more={"device_type": "cuda"}, **TWO),
    Case(id="LINK-11", status=SKIP, says="one node"),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [*CUDA_CASES, *CUDA_LIBRARY_CASES, *GPU_CASES, *LINK_CASES], ids=str
)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.parametrize(("nic_roots", "status"), [((0, 1), PASS), ((0,), WARN)])
def test_a_gpu_without_a_near_card_is_named(
    tmp_path: Path, nic_roots: tuple[int, ...], status: Status
) -> None:
    from vcli.topology import NicFacts

    def path(root: int, leaf: str) -> tuple[str, ...]:
        return (f"pci0000:{root}0", f"0000:{root}0:01.0", leaf)

    gpus = gpu_facts(2, pci_path=[path(0, "g0"), path(1, "g1")])
    nics = tuple(
        NicFacts(name=f"ib{r}", rdma_device=f"mlx5_{r}", pci_path=path(r, f"n{r}"))
        for r in nic_roots
    )
    case = Case(
        id="LINK-11",
        status=status,
        says="" if status is PASS else "no near card: GPU 1",
        remedy="" if status is PASS else "NCCL_IB_HCA=mlx5_0",
        host={"gpus": gpus, "nics": (*HEALTHY_HOST.nics, *nics)},
        config={"tp": 4, "nnodes": 2, "master_addr": "10.0.0.1"},
        more={"device_type": "cuda"},
    )
    check_case(case, tmp_path)


def test_an_older_driver_without_the_functions_is_no_crash(tmp_path: Path) -> None:
    # Every question is "function not found": no verdict, no error.
    more = nvml(FakeGpu(error=13), FakeGpu(error=13))
    for id_ in ("GPU-04", "GPU-05", "GPU-08", "GPU-10", "GPU-11"):
        check_case(Case(id=id_, status=SKIP, more=more, **TWO), tmp_path)


def test_a_refusal_of_nvml_is_unknown(tmp_path: Path) -> None:
    more = nvml(FakeGpu(error=4), FakeGpu(error=4))
    check_case(Case(id="GPU-04", status=UNKNOWN, says="error 4", more=more, **TWO), tmp_path)


@pytest.mark.parametrize(
    "variable",
    ["NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NVSHMEM_DISABLE_NVLS=1"],
)
def test_the_driver_is_not_asked_where_multicast_is_switched_off(
    tmp_path: Path, variable: str
) -> None:
    def refuse() -> CudaAnswer:
        raise AssertionError("asked in spite of the switch")

    name, value = variable.split("=")
    more = nvml(FakeGpu(), FakeGpu(), ask_cuda=refuse)
    case = Case(id="LINK-08", status=PASS, says=variable, environ={name: value}, more=more, **TWO)
    check_case(case, tmp_path)
