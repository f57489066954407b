"""`vcli topo` from outside: its text and its other views, 80 columns."""

import csv
import re
from pathlib import Path

import pytest

from tests.support.topo_runs import (
    H200,
    LLAMA_8B,
    QWEN3_MOE,
    model_folder,
    run_topo,
    warning_ids,
)
from vcli.topology import ParallelConfig, build_groups

EIGHTY = {
    "plain": ["-tp", "2", "-pp", "4"],
    "two nodes": ["-tp", "8", "-pp", "2", "-n", "2", "--master-addr", "10.0.0.1", *H200],
    "experts": ["-tp", "4", "-dp", "4", "-n", "2", "--moe", "-ep", "--enable-eplb", *H200],
    "all axes": ["-tp", "2", "-pp", "2", "-pcp", "2", "-dp", "2", "-dcp", "2", "-n", "4"],
    "1024 ranks": ["-tp", "8", "-pp", "4", "-dp", "32", "-n", "128", "--moe", "-ep", *H200],
    "a stage on each node": ["-tp", "8", "-pp", "128", "-n", "128", *H200],
    "one replica an instance": ["-dp", "4", "-dpr", "1"],
}


@pytest.mark.parametrize("name", EIGHTY)
@pytest.mark.parametrize("has_model", [False, True])
def test_text_fits_a_terminal_of_80_columns(
    name: str, has_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = EIGHTY[name]
    if has_model:
        has_experts = "--moe" in arguments or "-dpr" in arguments
        config: dict[str, object] = {**LLAMA_8B, "num_hidden_layers": 128}
        if has_experts:
            config = {**QWEN3_MOE, "num_experts": 256}
        arguments = [str(model_folder(tmp_path / "m", config)), *arguments]
    ran = run_topo(arguments, is_terminal=True)

    assert ran.status == 0, ran.err
    assert [line for line in ran.out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "view",
    [
        ["--rank", "3"],
        ["--group", "ep"],
        ["--explain", "ep"],
        ["--compare", "-tp 4 -dp 2 -ep"],
        ["--suggest"],
    ],
)
def test_other_views_fit_80_columns_too(
    view: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = model_folder(tmp_path / "m", QWEN3_MOE)
    ran = run_topo([str(folder), "-tp", "2", "-dp", "4", "-ep", *H200, *view], is_terminal=True)

    assert ran.status == 0, ran.err
    assert [line for line in ran.out.splitlines() if len(line) > 80] == []


def test_a_thousand_ranks_are_folded_and_outliers_stand_out() -> None:
    ran = run_topo(["-tp", "8", "-pp", "128", "-n", "128"])
    table = ran.out.split("\n\n")[1].splitlines()

    assert ran.out.count("\n") < 80
    assert [line.split()[0] for line in table[1:4]] == ["0-126", "127", "127"]
    assert [line.split()[2] for line in table[1:4]] == ["0-1015", "1016", "1017-1023"]
    assert table[2].endswith("replies")


def test_every_rank_is_in_the_table_up_to_a_screenful() -> None:
    table = run_topo(["-tp", "8", "-pp", "4"]).out.split("\n\n")[1].splitlines()

    assert len(table) == 33


def test_rank_table_names_numa_node_and_nic() -> None:
    ran = run_topo(["-tp", "8", "--gpus", "8", "--link", "8x400Gb"])

    assert re.search(r"^0 +5 +5 .*1 +nic\d \w+", ran.out, re.MULTILINE)


def test_memory_has_the_tokens_that_fit(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    memory = run_topo([str(folder), "-tp", "2", *H200, "--json"]).document["memory"]
    fit = memory["fit"][0]

    assert fit["weight_bytes"] == memory["ranks"][0]["weight_bytes"]
    assert fit["kv_tokens"] == fit["kv_bytes"] // (16 * fit["kv_bytes_per_token"]) * 16
    total = fit["weight_bytes"] + fit["kv_bytes"] + fit["other_bytes"]
    assert total == int(141 * 2**30 * 0.9)


def test_too_little_memory_for_one_sequence_is_told(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    arguments = [str(folder), "--gpus", "1", "--gpu", "l4", "--gpu-memory-utilization", "0.72"]

    assert "FIT-04" in warning_ids(arguments)
    assert "FIT-04" not in warning_ids([*arguments, "--max-model-len", "2048"])
    assert "FIT-04" in warning_ids([str(folder), "--gpus", "1", "--gpu", "t4"])


def test_expert_placement_is_shown(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, QWEN3_MOE)
    ran = run_topo([str(folder), "-tp", "2", "-dp", "2", "-ep", *H200])

    assert "  0: 0-31" in ran.out
    assert "  3: 96-127" in ran.out


def test_no_resource_tracker_stands_beside_the_processes() -> None:
    assert "resource_tracker" not in run_topo(["-tp", "2"]).out
    assert "ForkServer" in run_topo(["-tp", "2", "--start-method", "forkserver"]).out


def test_csv_has_a_row_for_every_rank() -> None:
    ran = run_topo(["-tp", "2", "-pp", "2", "-dp", "2", "--moe", "-ep", "--format", "csv"])
    rows = list(csv.DictReader(ran.out.splitlines()))

    assert len(rows) == 8
    assert rows[5]["title"] == "vcli::Worker_DP1_PP0_TP1_EP3"
    assert rows[5]["ep_group"] == "0 1 4 5"
    assert [row["rank"] for row in rows if row["is_output"] == "1"] == ["2", "2"]


def test_dot_and_mermaid_name_every_rank_and_hand_over() -> None:
    dot = run_topo(["-tp", "2", "-pp", "2", "-n", "2", "--format", "dot"]).out
    mermaid = run_topo(["-tp", "2", "-pp", "2", "-n", "2", "--format", "mermaid"]).out

    assert dot.count("{") == dot.count("}")
    assert dot.count(" -> ") == mermaid.count(" -->|PP| ") == 2
    assert dot.count("[label=") == 4 + 2
    assert mermaid.count("subgraph ") == mermaid.count("  end") == 4


@pytest.mark.parametrize("kind", ["tp", "pp", "pcp", "dcp", "dp", "ep", "eplb"])
def test_explanation_ends_in_the_groups_of_the_plan(kind: str) -> None:
    arguments = [*("-tp", "2", "-pp", "2", "-pcp", "2", "-dp", "2", "-dcp", "4")]
    arguments += ["--moe", "-ep", "--enable-eplb"]
    document = run_topo([*arguments, "--explain", kind, "--json"]).document
    text = run_topo([*arguments, "--explain", kind]).out
    config = ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        prefill_context_parallel_size=2,
        data_parallel_size=2,
        decode_context_parallel_size=4,
        is_moe=True,
        enable_expert_parallel=True,
        enable_eplb=True,
    )
    expected = [list(group) for group in build_groups(config)[document["kind"]]]

    assert document["groups"] == expected
    assert apply_swaps(document) == expected
    assert str(document["code"].split("(-1")[0].split(".")[-1]) in text
    assert f"[{','.join(map(str, expected[0]))}]" in text


def apply_swaps(document: dict[str, object]) -> list[list[int]]:
    """Turn and cut the grid as the explanation says, without looking at the groups."""
    sizes = list(document["shape"].values())  # type: ignore[attr-defined]
    axes = list(range(len(sizes)))
    for swap in document["swaps"]:  # type: ignore[attr-defined]
        a, b = map(int, re.findall(r"\d+", swap))
        axes[a], axes[b] = axes[b], axes[a]
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    row = [0]
    for axis in axes:
        row = [start + step * strides[axis] for start in row for step in range(sizes[axis])]
    size = document["group_size"]
    assert isinstance(size, int)
    return [row[start : start + size] for start in range(0, len(row), size)]


def test_one_rank_is_shown_with_all_its_groups(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    arguments = [str(folder), "-tp", "2", "-pp", "2", "-dp", "2"]
    document = run_topo([*arguments, "--rank", "6", "--json"]).document["rank"]
    text = run_topo([*arguments, "--rank", "6"]).out

    assert (document["rank"], document["dp_rank"], document["pp_rank"]) == (2, 1, 1)
    assert document["groups"]["PP"] == {"ranks": [0, 2], "rank_in_group": 1}
    assert "vcli::Worker_DP1_PP1_TP0" in text
    assert "16-31" in text


def test_one_kind_of_group_is_shown_with_its_nodes() -> None:
    ran = run_topo(["-tp", "4", "-pp", "2", "-n", "2", "--group", "PP"])

    assert len(re.findall(r"^\d +\[\d,\d\] +0-1 .* yes$", ran.out, re.MULTILINE)) == 4


def test_json_of_topo_is_a_document_of_its_own_schema(tmp_path: Path) -> None:
    document = run_topo([str(model_folder(tmp_path)), "-tp", "8", *H200, "--json"]).document

    assert document["schema"] == "vcli.topo/1"
    assert {"traffic", "facts", "hardware", "estimate", "memory", "ports"} <= set(document)
    assert document["nodes"][0]["descriptors"] > 64
    assert {c["name"] for c in document["nodes"][0]["channels"]} >= {"control", "lifeline", "ring"}
