"""PY checks: versions, torch's build against the driver, shadowed and doubled libraries."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.check_cases import Case, check_case
from tests.support.fake_host import FakePackages
from vcli.diagnostics import Status
from vcli.diagnostics.packages import Interpreter, TorchBuild, parse_torch_version, version_tuple
from vcli.topology import GpuFacts

PASS, WARN, FAIL, SKIP, UNKNOWN = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.UNKNOWN
GPUS = (GpuFacts(index=0),)


def packages(**fields: Any) -> Mapping[str, Any]:
    return {"packages": FakePackages(**fields)}


def cuda(version: str | None, tag: str) -> Mapping[str, Any]:
    build = TorchBuild(version=f"2.13.0+{tag}", cuda=version, hip=None)
    return {"packages": FakePackages(torch=build), "device_type": "cuda"}


CASES = [
    Case(
        id="PY-01",
        status=PASS,
        says="Python 3.12.1 (virtual environment)",
        more={
            "interpreter": Interpreter(version=(3, 12, 1), executable="/v/python", is_virtual=True)
        },
    ),
    Case(
        id="PY-01",
        status=FAIL,
        says="Python 3.9.2 at /usr/bin/python3",
        remedy="-m venv",
        more={
            "interpreter": Interpreter(
                version=(3, 9, 2), executable="/usr/bin/python3", is_virtual=False
            )
        },
    ),
    Case(id="PY-02", status=PASS, says="requirements met"),
    Case(
        id="PY-02",
        status=FAIL,
        says="tokenizers is missing",
        remedy="pip install 'tokenizers>=0.21'",
        more=packages(needs=("tokenizers>=0.21", "msgspec>=0.19")),
    ),
    Case(
        id="PY-02",
        status=WARN,
        says="msgspec 0.20 is outside >=0.30",
        remedy="'msgspec>=0.30'",
        more=packages(needs=("msgspec>=0.30",)),
    ),
    Case(id="PY-02", status=UNKNOWN, says="not installed as a package", more=packages(needs=())),
    Case(id="PY-03", status=PASS, says="torch 2.13.0+cpu (not imported)"),
    Case(id="PY-03", status=PASS, says="planned for the CPU", host={"gpus": GPUS}),
    Case(
        id="PY-03",
        status=FAIL,
        says="has no CUDA",
        remedy="CUDA 12.8",
        host={"gpus": GPUS, "cuda_driver_version": "12.9"},
        more=cuda(None, "cpu"),
    ),
    Case(
        id="PY-03",
        status=FAIL,
        says="is for CUDA 13.0, the driver knows up to 12.4",
        host={"gpus": GPUS, "cuda_driver_version": "12.4"},
        more=cuda("13.0", "cu130"),
    ),
    Case(
        id="PY-03",
        status=WARN,
        says="is for CUDA 12.8, the driver knows up to 12.4",
        host={"gpus": GPUS, "cuda_driver_version": "12.4"},
        more=cuda("12.8", "cu128"),
    ),
    Case(
        id="PY-03",
        status=PASS,
        host={"gpus": GPUS, "cuda_driver_version": "13.0"},
        more=cuda("13.0", "cu130"),
    ),
    Case(id="PY-03", status=FAIL, says="not installed", more=packages(torch=None)),
    Case(id="PY-04", status=PASS, says="nvidia-ml-py 13.0"),
    Case(
        id="PY-04",
        status=WARN,
        says="pynvml 8.0.4 owns the module",
        remedy="pip uninstall -y pynvml",
        more=packages(
            versions={"pynvml": "8.0.4", "nvidia-ml-py": "13.0"}, owned=(("pynvml", "pynvml.py"),)
        ),
    ),
    Case(
        id="PY-04",
        status=PASS,
        more=packages(versions={"pynvml": "13.0", "nvidia-ml-py": "13.0"}),
    ),
    Case(id="PY-04", status=SKIP, more=packages(versions={})),
    Case(id="PY-05", status=SKIP, says="no NCCL"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def nccl_file(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    text = b"\0" * 100 + f"NCCL version {version}+cuda13.0".encode()
    (folder / "libnccl.so.2").write_bytes(text)
    return folder


@pytest.mark.parametrize(
    ("other", "status", "says"),
    [("2.28.9", WARN, "2.28.9 in"), ("2.30.4", PASS, "NCCL 2.30.4")],
)
def test_two_nccl_libraries_warn_only_if_they_differ(
    tmp_path: Path, other: str, status: Status, says: str
) -> None:
    nccl_file(tmp_path / "torch/lib", "2.30.4")
    nccl_file(tmp_path / "root/opt/nccl", other)
    case = Case(
        id="PY-05",
        status=status,
        says=says,
        environ={"LD_LIBRARY_PATH": "/opt/nccl"},
        more=packages(folders={"torch": tmp_path / "torch"}),
    )
    check_case(case, tmp_path)


def test_a_single_nccl_library_passes_unread(tmp_path: Path) -> None:
    nccl_file(tmp_path / "torch/lib", "2.30.4")
    more = packages(folders={"torch": tmp_path / "torch"})
    check_case(Case(id="PY-05", status=PASS, says="libnccl.so.2", more=more), tmp_path)


def test_torch_s_version_file_is_read_as_text() -> None:
    text = (
        "from typing import Optional\n\n__all__ = ['__version__']\n__version__ = '2.13.0+cu130'\n"
        "debug = False\ncuda: Optional[str] = '13.0'\n"
        "git_version = 'abc'\nhip: Optional[str] = None\n"
    )
    assert parse_torch_version(text) == TorchBuild(version="2.13.0+cu130", cuda="13.0", hip=None)
    assert parse_torch_version("nothing") is None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("0.20", (0, 20)), ("3.0rc1", (3, 0)), ("2.0.dev1", (2, 0))],
)
def test_versions_become_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_tuple(text) == numbers
