"""What `vcli topo` warns of and suggests, and how it compares plans."""

import json
import re
from pathlib import Path

import pytest

from tests.support.topo_runs import (
    H200,
    LLAMA_8B,
    QWEN3_MOE,
    SMOLLM2,
    model_folder,
    run_topo,
    warning_ids,
)
from vcli.topology import HostFacts


@pytest.mark.parametrize(
    ("arguments", "config", "expected"),
    [
        (["-tp", "16", "-n", "2", *H200], LLAMA_8B, {"RDV-09", "NET-12", "PLAN-03"}),
        (["-tp", "8", "-pp", "2", "-n", "2", *H200], LLAMA_8B, {"PLAN-01"}),
        (["-tp", "4", *H200], SMOLLM2, {"PLAN-05"}),
        (["-pp", "16", "-tp", "1", "-n", "2", *H200], SMOLLM2, {"PLAN-06"}),
        (["-tp", "8", "-dp", "2", "-n", "2", "-ep", *H200], QWEN3_MOE, {"NET-12"}),
        (["-tp", "4", "-dp", "3", "-ep", "--gpus", "12"], QWEN3_MOE, {"PLAN-08"}),
        (["-tp", "8", "--gpus", "4"], LLAMA_8B, {"GPU-01"}),
        (["-tp", "2", "-n", "2", "--gpus", "8"], LLAMA_8B, {"PLAN-04"}),
    ],
)
def test_what_is_probably_not_meant_is_told(
    arguments: list[str], config: dict[str, object], expected: set[str], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path, config)
    address = [] if "PLAN-04" in expected else ["--master-addr", "n0"]

    assert expected <= set(warning_ids([str(folder), *arguments, *address]))


def test_a_good_plan_has_no_findings(tmp_path: Path) -> None:
    assert warning_ids([str(model_folder(tmp_path)), "-tp", "8", *H200]) == []


def test_suggestions_are_all_layouts_ranked_twice(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    ran = run_topo([str(folder), "--suggest", "-n", "2", *H200, "--json"])
    layouts = ran.document["layouts"]
    latencies = [layout["estimate"]["latency_s"] for layout in layouts]

    assert ran.document["schema"] == "vcli.topo.suggest/1"
    assert latencies == sorted(latencies)
    ranks = sorted(layout["throughput_rank"] for layout in layouts)
    assert ranks == list(range(1, len(layouts) + 1))
    assert {"-tp 8 -pp 2", "-tp 8 -dp 2", "-tp 4 -pp 4", "-dp 16"} <= {
        layout["flags"] for layout in layouts
    }
    for layout in layouts:
        single = layout["estimate"]["single"]
        parts = [single[f"{name}_s"] for name in ("weights", "kv", "compute", "overhead")]
        assert sum(parts) + sum(single["communication_s"].values()) == pytest.approx(
            single["latency_s"]
        )


def test_a_link_of_unknown_speed_is_never_the_best(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path))
    arguments = [folder, "--suggest", "-n", "2", "--gpus", "8", "--gpu", "h200"]
    ranked = run_topo([*arguments, "--json"]).document["layouts"]
    by_rate = sorted(ranked, key=lambda layout: layout["throughput_rank"])
    across = {"-tp 16", "-tp 8 -pp 2"}

    assert across <= {layout["flags"] for layout in ranked}
    for layouts in (ranked, by_rate):
        known = [layout["estimate"]["latency_s"] is not None for layout in layouts]
        assert known == sorted(known, reverse=True)
        assert not across & {layout["flags"] for layout in layouts[: sum(known)]}
    unknown = next(layout["estimate"] for layout in ranked if layout["flags"] == "-tp 16")
    assert (unknown["tokens_per_s"], unknown["single"]["communication_s"]) == (None, {"TP": None})
    text = run_topo(arguments).out
    assert re.search(r"^\d+ +-tp 16 +\? +\? ", text, re.MULTILINE)
    assert "network of unknown speed: --link 400Gb" in text


def test_a_plan_over_a_link_of_unknown_speed_shows_no_time(tmp_path: Path) -> None:
    gpus = ["--gpus", "8", "--gpu", "h200"]
    arguments = [str(model_folder(tmp_path)), "-tp", "16", "-n", "2", *gpus]
    ran = run_topo(arguments)

    assert re.search(r"^  TP 16 .* \?$", ran.out, re.MULTILINE)
    assert re.search(r"^  one request +\? a token$", ran.out, re.MULTILINE)
    assert run_topo([*arguments, "--json"]).document["traffic"]["groups"][0]["seconds"] is None
    assert "?" not in run_topo([*arguments, "--link", "400Gb"]).out


@pytest.mark.parametrize(
    ("gpu", "flags", "is_told"),
    [
        ("t4", [], True),
        ("v100", [], True),
        ("t4", ["--dtype", "float16"], False),
        ("a10", [], False),
    ],
)
def test_a_gpu_without_bfloat16_is_told_with_the_type_that_it_has(
    gpu: str, flags: list[str], is_told: bool, tmp_path: Path
) -> None:
    arguments = [str(model_folder(tmp_path)), "--gpus", "2", "--gpu", gpu, "-tp", "2", *flags]
    told = [
        warning["message"]
        for warning in run_topo([*arguments, "--json"]).document["warnings"]
        if warning["id"] == "FIT-06"
    ]

    assert bool(told) is is_told
    assert all(text.endswith("; --dtype float16") and "needs compute" in text for text in told)


def test_advice_about_memory_on_a_cpu_is_not_more_ranks(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    host = HostFacts(memory_available_bytes=16 * 1024**3)
    (tmp_path / "facts").write_text(json.dumps({"host": host.to_json()}))
    arguments = [str(folder), "--facts", str(tmp_path / "facts"), "--device", "cpu", "--json"]
    (message,) = [
        warning["message"]
        for warning in run_topo(arguments).document["warnings"]
        if warning["id"] == "FIT-04"
    ]

    assert "--max-model-len" in message
    assert message.endswith("or free some memory")


def test_suggestions_that_are_only_planned_are_marked(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path))
    text = run_topo([folder, "--suggest", "-n", "2", *H200]).out
    rows = [line.split("  ")[1].strip() for line in text.splitlines() if line[:1].isdigit()]
    assert "-tp 8 -dp 2 *" in rows
    assert "-tp 8 -pp 2" in rows
    assert all(row.endswith("*") == ("-dp" in row or "-dcp" in row) for row in rows), rows
    assert "* is planned for any engine, and not served by vcli yet." in " ".join(text.split())
    served = run_topo([folder, "--suggest", "--gpus", "1", "--gpu", "h200"]).out
    assert "*" not in served


def test_suggest_says_what_is_missing(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path, {**LLAMA_8B, "num_hidden_layers": 3200}))
    without_model = run_topo(["--suggest", *H200])
    without_gpus = run_topo([folder, "--suggest", "--device", "cpu"])
    too_large = run_topo([folder, "--suggest", "--gpus", "1", "--gpu", "l4"])

    assert [ran.status for ran in (without_model, without_gpus, too_large)] == [2, 2, 2]
    assert "needs a model" in without_model.err
    assert "--gpus 8 --gpu h100" in without_gpus.err
    assert "fits no layout of 1 GPU on 1 node(s) with 24 GiB" in too_large.err


def test_two_plans_stand_side_by_side(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    ran = run_topo([str(folder), "-tp", "4", "-pp", "2", *H200, "--compare", "-tp 8"])
    rows = {line[:22].strip(): line[22:] for line in ran.out.splitlines()}

    assert rows[""].split() == ["-tp", "4", "-pp", "2", "-tp", "8"] or "-tp 8" in ran.out
    assert any(name.startswith("TP groups") for name in rows)
    assert re.search(r"^TP groups +2 of 4 +1 of 8 +\*$", ran.out, re.MULTILINE)
    assert re.search(r"^ranks +8 +8$", ran.out, re.MULTILINE)


@pytest.mark.parametrize("flags", ["-tq 8", "-tp", "-tp x", "'", "--help", "--device cpu"])
def test_compare_refuses_what_is_no_layout(flags: str) -> None:
    ran = run_topo(["-tp", "4", "--compare", flags])

    assert ran.status == 2
    assert ran.out == ""
    assert "--compare" in ran.err
    assert ran.err.count("error: ") == 1
