"""Facts about GPUs and networks: from a fake NVML and a folder in the place of /sys and /proc."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vcli.diagnostics.gpu import collect_gpus
from vcli.diagnostics.host import collect_numa_cpus, parse_cpu_list
from vcli.diagnostics.network import collect_nics


class NVMLError(Exception):
    pass


class FakeNvml:
    """Four GPUs behind a switch, the last without peer access; one old function is missing."""

    NVMLError = NVMLError

    def __init__(self, *, fails: str = "", num_gpus: int = 4, has_nvlink: bool = True) -> None:
        self.fails = fails
        self.num_gpus = num_gpus
        self.has_nvlink = has_nvlink
        self.is_shut_down = False

    def nvmlInit(self) -> None:
        if self.fails:
            raise NVMLError(self.fails)

    def nvmlShutdown(self) -> None:
        self.is_shut_down = True

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}aaa"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30, free=(80 - handle) << 30)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:0{handle}:00.0".encode())

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetMigMode(self, handle: int) -> Any:
        raise NVMLError("Function Not Found")

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        assert kind == 0
        return 1 if 3 in (one, other) else 0

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if not self.has_nvlink or link >= 18:
            raise NVMLError("Not Supported")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=b"00000000:FF:00.0")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 10 if one // 2 == other // 2 else 50

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000


def test_nvml_tells_names_memory_links_and_peers(tmp_path: Path) -> None:
    nvml = FakeNvml()
    seen = collect_gpus({}, tmp_path, nvml)

    assert seen.problem == ""
    assert [gpu.index for gpu in seen.gpus] == [0, 1, 2, 3]
    assert seen.gpus[1].memory_free_bytes == 79 << 30
    assert seen.gpus[1].pci_bus_id == "0000:01:00.0"
    assert seen.gpus[1].compute_capability == (9, 0)
    assert {link.kind for link in seen.links} == {"NV18"}
    assert [link.can_access_peer for link in seen.links] == [True, True, False, True, False, False]
    assert (seen.driver_version, seen.cuda_driver_version) == ("580.65.06", "13.0")
    assert nvml.is_shut_down


def test_without_nvlink_the_common_ancestor_counts(tmp_path: Path) -> None:
    seen = collect_gpus({}, tmp_path, FakeNvml(has_nvlink=False))

    assert [link.kind for link in seen.links] == ["PIX", "SYS", "SYS", "SYS", "SYS", "PIX"]


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        ("2,0", ["GPU-2aaa", "GPU-0aaa"]),
        ("GPU-1,3", ["GPU-1aaa", "GPU-3aaa"]),
        ("1,9,2", ["GPU-1aaa"]),
        ("1,1", ["GPU-1aaa"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices_are_numbered_as_cuda_does(
    variable: str, uuids: list[str], tmp_path: Path
) -> None:
    seen = collect_gpus({"CUDA_VISIBLE_DEVICES": variable}, tmp_path, FakeNvml())

    assert [gpu.uuid for gpu in seen.gpus] == uuids
    assert [gpu.index for gpu in seen.gpus] == list(range(len(uuids)))
    assert len(seen.links) == len(uuids) * (len(uuids) - 1) // 2


def test_an_absent_driver_is_a_fact(tmp_path: Path) -> None:
    seen = collect_gpus({}, tmp_path, FakeNvml(fails="Driver Not Loaded"))

    assert seen.gpus == ()
    assert seen.problem == "NVML: Driver Not Loaded"


def test_without_nvml_the_kernel_module_names_the_gpus(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t NVIDIA L40S\nGPU UUID: \t GPU-77\n")
    device = tmp_path / "sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    link = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)
    seen = collect_gpus({}, tmp_path, FakeNvml(fails="Library Not Found"))

    assert [(gpu.name, gpu.uuid, gpu.numa_node) for gpu in seen.gpus] == [
        ("NVIDIA L40S", "GPU-77", 1)
    ]
    assert seen.gpus[0].pci_path == ("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0")


def interface(root: Path, name: str, **values: str) -> Path:
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    for key, value in {"operstate": "up", "mtu": "1500", "type": "1", **values}.items():
        (folder / key).write_text(value + "\n")
    return folder


def test_interfaces_have_speed_address_and_rdma_device(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", speed="400000", mtu="9000")
    interface(tmp_path, "eth1", speed="-1", operstate="down")
    interface(tmp_path, "lo", type="772")
    interface(tmp_path, "docker0")
    (tmp_path / "sys/class/infiniband/mlx5_0/device/net/eth0").mkdir(parents=True)
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    net.joinpath("route").write_text(
        "Iface Destination Gateway Flags RefCnt Use Metric Mask\n"
        "eth0 00000000 0100000A 3 0 0 0 00000000\n"
        "eth0 0000000A 00000000 1 0 0 0 00FFFFFF\n"
    )
    net.joinpath("fib_trie").write_text(
        "  |-- 10.0.0.7\n     /32 host LOCAL\n  |-- 127.0.0.1\n     /32 host LOCAL\n"
    )
    found = {nic.name: nic for nic in collect_nics(tmp_path)}

    assert set(found) == {"eth0", "eth1", "lo"}
    assert (found["eth0"].speed_mbit, found["eth0"].mtu) == (400000, 9000)
    assert found["eth0"].rdma_device == "mlx5_0"
    assert found["eth0"].addresses == ("10.0.0.7",)
    assert (found["eth1"].speed_mbit, found["eth1"].is_up) == (None, False)
    assert found["lo"].is_loopback
    assert found["lo"].addresses == ("127.0.0.1",)


def test_nothing_to_see_is_no_error(tmp_path: Path) -> None:
    assert collect_nics(tmp_path) == ()
    assert collect_numa_cpus(tmp_path) == ()


def test_numa_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for node, cpus in ((10, "8"), (2, "4-5,7"), (0, "0-3")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")

    assert collect_numa_cpus(tmp_path) == ((0, 1, 2, 3), (4, 5, 7), (8,))


def test_cpu_lists_are_read() -> None:
    assert parse_cpu_list("0-2,5") == (0, 1, 2, 5)
    assert parse_cpu_list("") == ()
