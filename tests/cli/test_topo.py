"""`vcli topo` from outside: views, three kinds of facts, 80 columns, refusals with a way out."""

import csv
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.topo_runs import LLAMA_8B, QWEN3_MOE, SMOLLM2, model_folder, run_topo
from vcli.topology import HostFacts, ParallelConfig, build_groups

H200 = ["--gpus", "8", "--gpu", "h200", "--link", "400Gb"]


def warning_ids(arguments: list[str]) -> list[str]:
    ran = run_topo([*arguments, "--json"])
    assert ran.status == 0, ran.out
    return [warning["id"] for warning in ran.document["warnings"]]


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


# --- facts ---------------------------------------------------------------------------------------


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


# --- judgement -----------------------------------------------------------------------------------


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


# --- views ---------------------------------------------------------------------------------------


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


# --- models --------------------------------------------------------------------------------------


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """A file with a true header whose data is a hole."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for count in shape:
            size *= count
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def test_weight_files_that_hold_another_model_are_told(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    safetensors(folder / "model.safetensors", {"x": [1000, 1000]})

    assert "FIT-03" in warning_ids([str(folder)])


def test_weight_files_that_fit_are_not_told(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    safetensors(folder / "model.safetensors", {"x": [8_030_261, 1000]})

    assert "FIT-03" not in warning_ids([str(folder)])


def test_a_config_file_alone_will_do(tmp_path: Path) -> None:
    model_folder(tmp_path)
    ran = run_topo([str(tmp_path / "config.json"), "-tp", "2", "--json"])

    assert ran.document["memory"]["num_parameters"] == 8_030_261_248


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["--format", "pdf"], "'pdf'", "text, csv"),
        (["--gpu", "h1000"], "h1000", "h100"),
        (["--gpus", "0"], "--gpus 0", "1..64"),
        (["--link", "400GB"], "400GB", "400Gb"),
        (["--link", "fast"], "fast", "400Gb"),
        (["--facts", "/no/such"], "/no/such", "--save-facts"),
        (["--facts", "/no/such", "--gpus", "2"], "--gpus", "leave out"),
        (["--device", "cpu", "--gpu", "h100"], "--device cpu", "leave out"),
        (["--rank", "1"], "no rank 1", "0..0"),
        (["--group", "xp"], "'xp'", "tp, dcp"),
        (["--explain", "ep"], "no EP groups", "--moe"),
        (["--explain", "eplb", "--moe"], "no EPLB groups", "--enable-eplb"),
        (["--rank", "0", "--explain", "tp"], "--rank and --explain", "one of them"),
        (["--json", "--format", "svg"], "--format svg and --json", "one of them"),
        (["--hosts", "a"], "--hosts", "--print-commands"),
        (["--batch", "0"], "--batch 0", "--batch 1"),
        (["--context", "-1"], "--context -1", "--context 1"),
        (["--save-facts", "/no/such/folder/f"], "/no/such/folder/f", "folder"),
        (["x.gguf"], "x.gguf", "path"),
        (["-dp", "2", "-dpr", "2"], "data_parallel_rank=2", "raise"),
    ],
)
def test_bad_input_is_one_message_with_a_hint(arguments: list[str], said: str, hint: str) -> None:
    ran = run_topo(arguments)
    shown = ran.err + ran.out
    assert ran.status == 2, shown
    assert said in shown
    assert hint in shown
    assert "Traceback" not in shown


@pytest.mark.process
@pytest.mark.parametrize("view", [[], ["--suggest"], ["--format", "html"], ["--json"]])
def test_no_view_loads_a_heavy_module(view: list[str], tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    script = (
        "import sys\n"
        "from vcli.cli.main import main\n"
        "from vcli.cli.environment import Environment\n"
        "status = main(Environment.of_this_process())\n"
        "heavy = ('torch', 'transformers', 'fastapi', 'ray', 'numpy', 'rich.table', 'pynvml')\n"
        "print([name for name in heavy if name in sys.modules], status, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script, "topo", str(folder), "-tp", "8", *H200, *view]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stderr.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize(
    ("typed", "value"), [([], "triton"), (["--attention-backend", "flashinfer"], "flashinfer")]
)
def test_attention_backend_is_the_typed_one(tmp_path: Path, typed: list[str], value: str) -> None:
    folder = model_folder(tmp_path / "m")
    decisions = run_topo([str(folder), *H200, *typed, "--json"]).document["decisions"]
    assert {decision["name"]: decision["value"] for decision in decisions}["attention"] == value
