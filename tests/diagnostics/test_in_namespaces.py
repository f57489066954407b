"""Checks about the kernel, in real namespaces and under real limits."""

import pytest

from tests.support.namespaces import check_in, run_doctor

pytestmark = pytest.mark.process

SMALL_SHM = "mount -t tmpfs -o size=8m tmpfs /dev/shm"
TWO_NODES = ["-n", "2", "-tp", "2", "--master-addr", "10.7.0.1"]
NET = ("--mount", "--net", "--uts")
LINK = (
    "mount -t sysfs sysfs /sys; ip link set lo up; ip link add eth7 type veth peer name far7; "
    "ip addr add 10.7.0.1/24 dev eth7; ip link set eth7 up; ip link set far7 up; hostname gpu-a"
)


def hosts(line: str) -> str:
    """Lines that put another /etc/hosts in place, on a file system of this namespace."""
    return (
        f"mount -t tmpfs tmpfs /mnt; printf '{line}\\n' > /mnt/hosts; "
        "mount --bind /mnt/hosts /etc/hosts"
    )


def test_a_small_dev_shm_fails_both_checks() -> None:
    status, document = run_doctor(SMALL_SHM, ["lim-01", "lim-02", "-tp", "2"])
    assert status == 1
    assert check_in(document, "LIM-01")["status"] == "fail"
    assert "8.0 MiB free" in check_in(document, "LIM-01")["measured"]
    allocation = check_in(document, "LIM-02")
    assert allocation["status"] == "fail"
    assert "No space left" in allocation["measured"]
    assert "size=1G" in allocation["remedy"] or "shm-size" in allocation["remedy"]


def test_a_roomy_dev_shm_passes_both_checks() -> None:
    status, document = run_doctor(
        "mount -t tmpfs -o size=64m tmpfs /dev/shm", ["lim-01", "lim-02", "-tp", "2"]
    )
    assert status == 0
    assert {item["status"] for item in document["checks"]} == {"pass"}


def test_a_read_only_dev_shm_fails_to_allocate() -> None:
    _, document = run_doctor("mount -t tmpfs -o ro tmpfs /dev/shm", ["lim-02"])
    assert "Read-only file system" in check_in(document, "LIM-02")["measured"]


def test_a_small_or_read_only_cache_fails() -> None:
    setup = "mount -t tmpfs -o size=64m tmpfs /mnt"
    _, small = run_doctor(setup, ["host-07"], environ={"VCLI_HOME": "/mnt"})
    assert check_in(small, "HOST-07")["status"] == "fail"
    assert "/mnt/cache (VCLI_HOME) has 64.0 MiB free" in check_in(small, "HOST-07")["measured"]
    closed_setup = "mount -t tmpfs -o ro tmpfs /mnt"
    _, closed = run_doctor(closed_setup, ["host-07"], environ={"VCLI_HOME": "/mnt"})
    assert "(VCLI_HOME) cannot be written" in check_in(closed, "HOST-07")["measured"]
    assert "VCLI_HOME=" in check_in(closed, "HOST-07")["remedy"]


def test_a_host_name_that_is_loopback_warns_with_two_nodes_and_its_remedy_cures() -> None:
    bad = f"{LINK}; {hosts('127.0.1.1 gpu-a')}"
    status, document = run_doctor(bad, ["host-04", *TWO_NODES], flags=NET)
    entry = check_in(document, "HOST-04")
    assert (status, entry["status"]) == (0, "warn")
    assert "127.0.1.1, which is loopback" in entry["measured"]
    assert "eth7" in entry["remedy"]
    status, document = run_doctor(
        bad, ["host-04", *TWO_NODES], flags=NET, environ={"GLOO_SOCKET_IFNAME": "eth7"}
    )
    assert (status, check_in(document, "HOST-04")["status"]) == (0, "pass")
    good = f"{LINK}; {hosts('10.7.0.1 gpu-a')}"
    status, document = run_doctor(good, ["host-04", *TWO_NODES], flags=NET)
    assert (status, check_in(document, "HOST-04")["status"]) == (0, "pass")


def test_an_interface_variable_is_held_against_the_interfaces_of_this_namespace() -> None:
    right = {"NCCL_SOCKET_IFNAME": "=eth7", "GLOO_SOCKET_IFNAME": "eth7"}
    status, _ = run_doctor(LINK, ["env-02"], flags=NET, environ=right)
    assert status == 0
    status, document = run_doctor(
        LINK, ["env-02", *TWO_NODES], flags=NET, environ={"NCCL_SOCKET_IFNAME": "ib0"}
    )
    assert status == 1
    entry = check_in(document, "ENV-02")
    assert "NCCL_SOCKET_IFNAME=ib0 fits none of" in entry["measured"]
    assert "NCCL_SOCKET_IFNAME=eth7" in entry["remedy"]


def test_the_address_toward_node_0_needs_a_route() -> None:
    status, document = run_doctor(LINK, ["net-01", *TWO_NODES], flags=NET)
    assert status == 0
    assert "10.7.0.1 toward 10.7.0.1 (eth7" in check_in(document, "NET-01")["measured"]
    away = ["-n", "2", "-tp", "2", "--master-addr", "10.8.0.1", "-r", "1"]
    status, document = run_doctor(LINK, ["net-01", *away], flags=NET)
    assert status == 1
    assert "no route to 10.8.0.1" in check_in(document, "NET-01")["measured"]


def test_node_0_must_have_the_master_s_address() -> None:
    foreign = ["-n", "2", "-tp", "2", "--master-addr", "10.7.0.9"]
    _, document = run_doctor(LINK, ["net-03", *foreign], flags=NET)
    entry = check_in(document, "NET-03")
    assert entry["status"] == "fail"
    assert entry["remedy"].startswith("--master-addr 10.7.0.1")
    _, document = run_doctor(LINK, ["net-03", *TWO_NODES], flags=NET)
    assert check_in(document, "NET-03")["status"] == "pass"


@pytest.mark.parametrize(("limit", "status"), [("256:512", "fail"), ("256:4096", "pass")])
def test_the_hard_limit_of_open_files_decides(limit: str, status: str) -> None:
    _, document = run_doctor("", ["lim-05"], prefix=f"prlimit --nofile={limit}")
    assert check_in(document, "LIM-05")["status"] == status
