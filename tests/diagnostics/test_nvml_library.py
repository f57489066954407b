"""The doctor with a real, if small, libnvidia-ml.so.1 that nvidia-ml-py loads."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pynvml")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"),
         str(ROOT / "tests/support/fake_nvml.c")],
        check=True, timeout=60,
    )  # fmt: skip
    return folder


def doctor(folder: Path, *arguments: str, **environ: str) -> tuple[int, dict[str, Any], float]:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "vcli.cli", "doctor", "--json", *arguments],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), **environ},
    )  # fmt: skip
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    by_id = {item["id"]: item for item in document.get("checks", ())}
    return (
        done.returncode,
        {"checks": by_id, "host": document.get("host")},
        (time.monotonic() - begin),
    )


def test_the_faults_of_the_second_gpu_are_found(library_folder: Path) -> None:
    status, document, _ = doctor(library_folder, "cuda-01", "gpu", "link", "-tp", "2")
    checks = document["checks"]
    assert [gpu["name"] for gpu in document["host"]["gpus"]] == ["NVIDIA Fake 80GB"] * 2
    assert checks["CUDA-01"]["measured"] == "driver 580.95.05"
    assert checks["GPU-05"]["status"] == "warn"
    assert checks["GPU-05"]["measured"] == "GPU 1: a remapping waits for a reset"
    assert checks["LINK-01"]["measured"] == "1 of 1 pair not OK: 0-1 CNS"
    assert checks["LINK-03"]["status"] == "fail"
    assert checks["LINK-03"]["measured"] == "GPU 1 has 3 of 4 links up"
    assert status == 1


def test_functions_that_this_driver_lacks_are_skipped(library_folder: Path) -> None:
    _, document, _ = doctor(library_folder, "gpu", "cuda-09", "link-07")
    for id_ in ("GPU-04", "GPU-08", "GPU-10", "LINK-07"):
        assert document["checks"][id_]["status"] == "skip", document["checks"][id_]
    assert document["checks"]["CUDA-09"]["status"] == "pass"


@pytest.mark.parametrize(("state", "status"), [("3", "pass"), ("2", "fail")])
def test_the_fabric_is_asked_by_reference(library_folder: Path, state: str, status: str) -> None:
    """By value, the C library would write to a wild address."""
    _, document, _ = doctor(library_folder, "link-07", FAKE_NVML_FABRIC=state)
    assert document["checks"]["LINK-07"]["status"] == status


def test_a_driver_that_is_not_loaded_fails_with_its_code(library_folder: Path) -> None:
    _, document, _ = doctor(library_folder, "cuda-01", "--device", "cuda", FAKE_NVML_INIT="9")
    entry = document["checks"]["CUDA-01"]
    assert entry["status"] == "fail"
    assert "code 9" in entry["measured"]


def test_a_hung_question_costs_its_deadline_and_the_program_still_ends(
    library_folder: Path,
) -> None:
    _, document, seconds = doctor(library_folder, "gpu-11", "gpu-05", FAKE_NVML_HANG="1")
    assert document["checks"]["GPU-11"]["status"] == "unknown"
    assert "no answer within" in document["checks"]["GPU-11"]["measured"]
    assert document["checks"]["GPU-05"]["status"] == "warn"
    assert seconds < 20
