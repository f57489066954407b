"""`--device-ids` as typed: what topo shows, what serve and doctor refuse, what children get."""

import inspect
import io
import json
from pathlib import Path

import pytest

from tests.support.fake_nvml import FakeGpu, FakeNvml, gpu_facts
from tests.support.topo_runs import SMOLLM2, model_folder, run_topo
from vcli.cli import topo_facts
from vcli.cli.commands.bench_offline import offline
from vcli.cli.device_ids import OwnDevices, own_devices
from vcli.cli.environment import Environment
from vcli.cli.main import main
from vcli.diagnostics import gpu as diagnostics_gpu
from vcli.topology import ExitStatus, HostFacts, ParallelConfig

UUIDS = ("GPU-8f3a1c2e77", "GPU-11b200", "GPU-22c300", "GPU-33d400")


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    """A machine with four GPUs, in the place of this one."""
    fake = FakeNvml([FakeGpu(answers={"UUID": uuid, "Name": "NVIDIA H100"}) for uuid in UUIDS])
    collect = diagnostics_gpu.collect_gpus
    monkeypatch.setattr(
        diagnostics_gpu, "collect_gpus", lambda environ: collect(environ, tmp_path, fake)
    )
    for module in ("topo_facts", "doctor_facts", "build"):
        monkeypatch.setattr(f"vcli.cli.{module}.has_nvidia_gpu", lambda: True)


def ranks_of(ran):
    return [
        (rank["gpu_index"], rank["gpu_visible_index"], rank["gpu_physical_index"], rank["gpu_uuid"])
        for rank in ran.document["nodes"][0]["ranks"]
    ]


def test_topo_plans_on_the_chosen_gpus_with_all_their_numbers(nvml):
    environ = {"CUDA_VISIBLE_DEVICES": "3,0,1"}
    ran = run_topo(["-tp", "2", "--device-ids", "2,GPU-8f", "--json"], environ=environ)
    assert ran.status == 0, ran.err
    assert ranks_of(ran) == [(0, 2, 1, "GPU-11b200"), (1, 1, 0, "GPU-8f3a1c2e77")]


def test_topo_shows_the_numbers_where_they_differ(nvml):
    lines = run_topo(["--device-ids", "2"], environ={"CUDA_VISIBLE_DEVICES": "0,1,3"}).out
    header, row = (line.split() for line in lines.splitlines()[2:4])
    shown = dict(zip(header, row, strict=False))
    assert (shown["gpu"], shown["visible"], shown["physical"]) == ("0", "2", "3")
    one = run_topo(["--device-ids", "2", "--rank", "0"], environ={}).out
    assert "cuda:0 = visible 2 = GPU 2 (GPU-22c300)" in one


@pytest.mark.parametrize(
    ("arguments", "environ", "status", "says"),
    [
        (["--device-ids", "7"], {}, 2, "shows 4 GPUs, numbered from 0 to 3"),
        (["--device-ids", "1"], {"CUDA_VISIBLE_DEVICES": "2"}, 2, "CUDA_VISIBLE_DEVICES=2"),
        (["--device-ids", "0", "-tp", "2"], {}, 2, "the 2 ranks on this node need 2"),
        (["--device-ids", "0", "--device", "cpu"], {}, 2, "--device cpu uses none"),
        (["--device-ids", "MIG-1"], {}, 2, "MIG slice"),
        (["--device-ids", "GPU-zz"], {}, 2, "no such UUID"),
        (["--device-ids", ""], {}, 2, "neither a number nor a UUID"),
        (["--device-ids", "0"], {"CUDA_VISIBLE_DEVICES": ""}, 1, "hides every GPU"),
        (["--device-ids", "0"], {"CUDA_VISIBLE_DEVICES": "-1"}, 1, "hides every GPU"),
        (["--device-ids", "0"], {"CUDA_VISIBLE_DEVICES": "0,0"}, 1, "0 comes twice"),
    ],
)
def test_topo_refuses_with_the_status_of_who_is_wrong(nvml, arguments, environ, status, says):
    ran = run_topo(arguments, environ=environ)
    assert ran.status == status
    assert says in ran.err
    assert "→" in ran.err


def test_assumed_gpus_can_be_chosen_among_and_guessed_ones_cannot(monkeypatch):
    monkeypatch.setattr(topo_facts, "has_nvidia_gpu", lambda: False)
    ran = run_topo(["--gpus", "8", "--device-ids", "6,7", "-tp", "2", "--json"])
    assert [rank[0] for rank in ranks_of(ran)] == [0, 1]
    refused = run_topo(["--device-ids", "0"])
    assert refused.status == 2
    assert "no GPU is seen" in refused.err


def test_several_machines_have_no_one_list(tmp_path: Path):
    paths = []
    for name in "ab":
        paths += ["--facts", str(tmp_path / name)]
        host = HostFacts(hostname=name, gpus=gpu_facts(2)).to_json()
        (tmp_path / name).write_text(json.dumps({"host": host}))
    ran = run_topo([*paths, "--device-ids", "0"])
    assert ran.status == 2
    assert "one node" in ran.err


def test_own_environment_stays_and_the_childrens_is_composed():
    host = HostFacts(gpus=gpu_facts(4))
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "OTHER": "x"}
    devices = own_devices(host, "3,1", environ, parallel=ParallelConfig(tensor_parallel_size=2))
    assert devices.compose(environ) == {"CUDA_VISIBLE_DEVICES": "GPU-3,GPU-1", "OTHER": "x"}
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_without_the_flag_children_inherit_what_the_user_set():
    devices = own_devices(HostFacts(gpus=gpu_facts(2)), None, {"CUDA_VISIBLE_DEVICES": "1"})
    assert devices == OwnDevices(host=HostFacts(gpus=gpu_facts(2)), variable=None)


def test_serve_says_what_hides_the_gpus(nvml, tmp_path):
    folder = model_folder(tmp_path / "m", SMOLLM2)
    for variable, status, says in (("", 1, "hides every GPU"), ("9", 1, "9 is unknown")):
        stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        found = main(
            Environment(
                argv=("serve", str(folder), "--load-format", "dummy", "--dry-run"),
                environ={"CUDA_VISIBLE_DEVICES": variable},
                cwd=tmp_path,
                stdout=stdout,
                stderr=stderr,
            )
        )
        stderr.flush()
        text = stderr.buffer.getvalue().decode()
        assert found == ExitStatus(status), text
        assert says in text


def test_bench_offline_takes_what_serve_takes():
    assert "device_ids" in inspect.signature(offline).parameters
