"""What `vcli topo` says of saved, described and seen machines."""

import json
from pathlib import Path

import pytest

from tests.support.topo_runs import run_topo
from vcli.topology import HostFacts


def test_cuda_is_planned_with_a_warning_where_no_gpu_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vcli.cli.topo_facts.has_nvidia_gpu", lambda: False)
    ran = run_topo(["-tp", "4", "--device", "cuda", "--json"])

    assert ran.status == 0
    assert ran.document["device_type"] == "cuda"
    assert "FACT-01" in [warning["id"] for warning in ran.document["warnings"]]
    assert ran.document["facts"]["host"]["is_assumed"]


def test_saved_facts_plan_for_the_other_machine(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    saved = run_topo(["--save-facts", str(path), "--json"])
    document = json.loads(path.read_text())
    host = HostFacts.from_json(document["host"])
    loaded = run_topo(["-tp", "1", "--facts", str(path), "--json"])

    assert saved.status == 0
    assert document["schema"] == "vcli.facts/1"
    assert loaded.document["facts"]["host"] == host.to_json()
    assert loaded.document["facts"]["source"].startswith("saved: ")


def saved_host(path: Path, num_gpus: int, **values: object) -> str:
    gpus = [
        {"index": index, "name": "NVIDIA H100 80GB HBM3", "memory_total_bytes": 80 * 2**30}
        for index in range(num_gpus)
    ]
    path.write_text(
        json.dumps({"host": {"hostname": path.stem, "cpu_count": 64, "gpus": gpus, **values}})
    )
    return str(path)


def test_facts_of_a_machine_that_is_too_small_refuse_the_plan(tmp_path: Path) -> None:
    four = saved_host(tmp_path / "four.json", 4)
    ran = run_topo(["-tp", "8", "--facts", four])

    assert ran.status == 2
    assert "8 ranks on one node need as many GPUs, four has 4" in ran.err
    assert "--nnodes 2" in ran.err


def test_uneven_nodes_are_named(tmp_path: Path) -> None:
    eight = saved_host(tmp_path / "a.json", 8)
    other = saved_host(tmp_path / "b.json", 8, cpu_count=32)
    small = saved_host(tmp_path / "c.json", 4)
    arguments = ["-tp", "8", "-pp", "2", "-n", "2", "--master-addr", "a", "--facts", eight]
    ran = run_topo([*arguments, "--facts", other])
    refused = run_topo([*arguments, "--facts", small])

    assert "node 1 (b) differs from node 0 (a): CPUs 32 against 64" in ran.out.replace(
        "\n    ", " "
    )
    assert refused.status == 2
    assert "c has 4" in refused.err


def test_gpus_over_the_sockets_in_a_tp_group_are_named_with_a_better_order(tmp_path: Path) -> None:
    gpus = [{"index": i, "name": "NVIDIA L40S", "numa_node": i % 2} for i in range(4)]
    links = [
        {"first": a, "second": b, "kind": "SYS" if (a + b) % 2 else "PIX"}
        for a in range(4)
        for b in range(a + 1, 4)
    ]
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"host": {"gpus": gpus, "links": links, "cpu_count": 64}}))
    ran = run_topo(["-tp", "2", "-pp", "2", "--facts", str(path), "--json"])
    messages = [w["message"] for w in ran.document["warnings"] if w["id"] == "LINK-05"]

    assert len(messages) == 2
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in messages[0]
