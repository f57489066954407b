"""What the doctor writes and repairs: facts, baseline and its comparison, bundle, --fix."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.cli.test_doctor import Ran
from tests.support.fake_host import HEALTHY_HOST, make_context
from vcli.diagnostics import CheckRegistry, Status, check, failed, make_report, passed, run_checks
from vcli.diagnostics.baseline import baseline_json, changes_since
from vcli.diagnostics.check import Check, Remedy
from vcli.diagnostics.repairs import repair
from vcli.topology import ConfigError, HostFacts

SECRETS = {
    "HF_TOKEN": "plain-secret-one",
    "http_proxy": "http://me:secret-two@proxy:1",
    "WANDB_API_KEY": "secret-three",
    "MY_URL": "https://x/y?token=secret-four",
    "NOTE": "hf_secretfiveabcdefghijkl",
}


def test_saved_facts_are_read_by_topo(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    assert Ran(["host-01", "--save-facts", str(path)]).status == 0
    assert HostFacts.from_json(json.loads(path.read_text())["host"]).cpu_count >= 1


def test_a_bundle_holds_report_and_system_but_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "issue.tgz"
    ran = Ran(["env", "host", "--bundle", str(path)], environ=SECRETS)
    assert ran.status == 0
    assert "report.json, environment.txt" in ran.err
    with tarfile.open(path) as archive:
        texts = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            texts[member.name] = file.read().decode()
    assert {"issue/report.txt", "issue/report.json", "issue/system/proc/meminfo"} <= set(texts)
    everything = "\n".join(texts.values()) + ran.out + ran.err
    for secret in ("secret-one", "secret-two", "secret-three", "secret-four", "secretfive"):
        assert secret not in everything
    assert json.loads(texts["issue/report.json"])["summary"]["fail"] == 0


def test_an_unwritable_file_is_exit_2(tmp_path: Path) -> None:
    for flag in ("--bundle", "--save-facts", "--save-baseline"):
        ran = Ran(["host-01", flag, str(tmp_path / "no/such/folder/x")])
        assert ran.status == 2
        assert "cannot be written" in ran.err


def test_nothing_differs_from_a_baseline_just_saved(tmp_path: Path) -> None:
    path = str(tmp_path / "good.json")
    assert Ran(["host-01", "lim-08", "--save-baseline", path]).status == 0
    ran = Ran(["host-01", "lim-08", "--baseline", path])
    assert "nothing differs from the baseline" in ran.out
    worse = Ran(
        ["host-01", "lim-08", "--baseline", path, "--json"], environ={"TMPDIR": "/" + "x" * 120}
    )
    assert [change["subject"] for change in worse.document["changes"]] == ["LIM-08"]
    assert worse.document["changes"][0]["before"].startswith("pass: ")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "vcli.doctor/1"}'])
def test_a_file_that_is_no_baseline_is_exit_2(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    ran = Ran(["host-01", "--baseline", str(path)])
    assert ran.status == 2
    assert "--save-baseline" in ran.err


def saying(finding) -> Check:
    remedy = Remedy(bare_metal="x")
    return check("GPU-09", "t", why="w", expected="e", remedy=remedy)(lambda context: finding)


def test_worse_verdicts_and_changed_hardware_are_told(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.support.fake_nvml import gpu_facts

    context = make_context(tmp_path)

    def report_of(finding):
        checks = CheckRegistry([saying(finding)]).checks
        return make_report(run_checks(checks, context).results, seconds=0.0)

    before = replace(HEALTHY_HOST, gpus=gpu_facts(2), driver_version="550.1")
    after = replace(HEALTHY_HOST, gpus=gpu_facts(1), driver_version="580.2")
    kept = baseline_json(report_of(passed("fine")), before)
    changes = changes_since(json.loads(json.dumps(kept)), report_of(failed("broken")), after)
    assert [change["subject"] for change in changes] == ["GPU-09", "driver_version", "gpus"]
    assert changes[0]["now"] == "fail: broken"
    with pytest.raises(ConfigError):
        changes_since({"schema": "other"}, report_of(passed("x")), after)


def test_fix_removes_only_files_of_vcli_that_nobody_uses(tmp_path: Path) -> None:
    context = make_context(
        tmp_path,
        files={
            "dev/shm/vcli_ring_1": "x",
            "dev/shm/vcli_used": "x",
            "dev/shm/nccl-foreign": "x",
            "dev/shm/other": "x",
            "proc/12/maps": "7f00-7f01 rw-s 0 00:19 3 /dev/shm/vcli_used\n",
        },
    )
    done = repair(context)
    left = {path.name for path in (tmp_path / "dev/shm").iterdir()}
    assert left == {".keep", "vcli_used", "nccl-foreign", "other"}
    assert done[0].startswith("removed /dev/shm/vcli_ring_1")
    assert done[1] == "made /home/me/.cache/vcli"
    assert (tmp_path / "home/me/.cache/vcli").is_dir()
    assert repair(context) == ()


def test_fix_says_what_it_did(tmp_path: Path) -> None:
    ran = Ran(["host-01", "--fix"], environ={"VCLI_HOME": str(tmp_path / "home")})
    assert ran.status == 0
    assert f"fix: made {tmp_path / 'home'}/cache" in ran.err


def test_statuses_of_a_baseline_survive_json() -> None:
    assert [Status(status.value) for status in Status] == list(Status)
