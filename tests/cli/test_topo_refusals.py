"""Every layout that engines refuse is refused here too, with the rule and the nearest choices."""

from pathlib import Path

import pytest

from tests.support.topo_runs import LLAMA_8B, QWEN3_MOE, SMOLLM2, model_folder, run_topo

SIZES = [
    (["-tp", "0"], "must be at least 1", "--tensor-parallel-size 1"),
    (["-pp", "-1"], "must be at least 1", "--pipeline-parallel-size 1"),
    (["-dp", "0"], "must be at least 1", "--data-parallel-size 1"),
    (["-n", "0"], "must be at least 1", "--nnodes 1"),
    (["--master-port", "70000"], "must lie in 1..65534", "--master-port 29501"),
    (["-tp", "8", "-n", "3"], "nnodes=3 must divide the 8 ranks", "--nnodes: 1, 2, 4"),
    (["-tp", "8", "-n", "2", "-r", "2"], "node_rank=2 must lie in 0..1", "--node-rank 1"),
    (["-tp", "8", "-dcp", "3"], "must divide tensor_parallel_size=8", ": 1, 2, 4, 8"),
    (["-tp", "4", "-pcp", "2", "-dcp", "4"], "must be 1, prefill_context", ": 1, 2, 8"),
    (["-dp", "2", "-dpl", "3"], "data_parallel_size_local=3 must lie in 1..2", ": 1, 2"),
    (["-dp", "2", "-dpr", "2"], "data_parallel_rank=2 must lie in 0..1", "raise"),
    (["-dpr", "0"], "needs data_parallel_size > 1", "raise --data-parallel-size"),
    (["-dpe"], "needs data_parallel_size > 1", "raise --data-parallel-size"),
    (["-dp", "4", "-dpe"], "leaves open which replica", "--data-parallel-rank 0..3"),
    (["-dp", "4", "-dpr", "1", "-dpl", "2"], "must be 1 with external", "-local 1"),
    (["-dp", "4", "-dph", "-dpr", "1"], "exclude each other", "give"),
    (["-dp", "4", "-dph"], "number of replicas on this node", "-size-local N"),
    (["-dp", "4", "-dph", "-dpl", "2", "--headless"], "hybrid load balancing needs", "leave out"),
    (["-dp", "2", "-n", "2", "--data-parallel-backend", "ray"], "data_parallel_backend=mp", "mp"),
    (["-dp", "2", "--data-parallel-backend", "slurm"], "'slurm' is unknown", "mp, ray"),
    (["-dp", "4", "-dpl", "3", "-n", "2"], "do not fill nnodes=2 evenly", "--nnodes: 1, 2"),
    (["--moe", "--enable-eplb", "-tp", "2"], "needs expert parallelism", "--enable-expert"),
    (["--moe", "-ep", "--enable-eplb"], "more than one rank", "--tensor-parallel-size 2"),
    (["-tp", "2", "--num-redundant-experts", "4"], "needs expert load", "--enable-eplb"),
    (["--num-redundant-experts", "-1"], "must not be negative", "0"),
    (
        ["--moe", "-ep", "--enable-eplb", "-tp", "2", "--device", "cpu"],
        "moves experts between GPUs",
        "--gpus 8",
    ),
    (["--api-server-count", "0"], "leaves no API server", "--api-server-count 1"),
    (["--api-server-count", "2", "--headless"], "contradicts headless", "leave out"),
    (["-tp", "2", "--distributed-executor-backend", "uni"], "uni runs one rank", "mp"),
    (["--distributed-executor-backend", "xyz"], "'xyz' is unknown", "uni, mp"),
    (
        ["-tp", "2", "-n", "2", "--distributed-executor-backend", "ray"],
        "needs one of mp, uni, external_launcher",
        "mp",
    ),
    (["--attention-backend", "xyz"], "'xyz' is unknown", "auto, torch, flashinfer, triton"),
    (["--start-method", "clone"], "'clone' is unknown", "spawn, fork, forkserver"),
    (["-pp", "2", "--pp-layer-partition", "8"], "must be 2 numbers", "leave it out"),
]
MODELS = [
    (LLAMA_8B, ["-pp", "33"], "more than the model's 32 layers", "1..32"),
    (LLAMA_8B, ["-pp", "2", "--pp-layer-partition", "16,17"], "adds up to 33", "16,16"),
    (LLAMA_8B, ["-ep", "-tp", "2"], "needs a model with experts", "leave out"),
    (LLAMA_8B, ["-dp", "2", "-dpr", "0"], "replicas of a dense model", "an instance of its own"),
    (LLAMA_8B, ["-tp", "8", "-dcp", "2"], "as many replicas of each KV head", ": 1"),
    (LLAMA_8B, ["-tp", "32", "-dcp", "8"], "as many replicas of each KV head", ": 1, 2, 4"),
    (LLAMA_8B, ["--max-model-len", "9000"], "above the model's 8192", "--max-model-len 8192"),
    (
        LLAMA_8B,
        ["--attention-backend", "triton", "--device", "cpu"],
        "Triton needs CUDA, the device is cpu",
        "--attention-backend auto",
    ),
    (LLAMA_8B, ["--dtype", "int4"], "'int4' is not supported", "bfloat16"),
    (SMOLLM2, ["-tp", "8"], "would be padded to 8, more than 2 times", ": 4, 5, 6, 9"),
    (QWEN3_MOE, ["-dp", "129", "-ep"], "more than the 128 experts", "lower"),
    (
        QWEN3_MOE,
        ["-tp", "4", "-ep", "--enable-eplb", "--num-redundant-experts", "2", "--gpus", "4"],
        "do not divide",
        "--num-redundant-experts 4",
    ),
]


@pytest.mark.parametrize(("arguments", "rule", "hint"), SIZES)
def test_sizes_that_contradict_each_other_are_refused(
    arguments: list[str], rule: str, hint: str
) -> None:
    ran = run_topo(arguments)

    assert ran.status == 2, ran.out
    assert rule in ran.err
    assert hint in ran.err.split("→")[1]


@pytest.mark.parametrize(("config", "arguments", "rule", "hint"), MODELS)
def test_sizes_that_the_model_cannot_have_are_refused(
    config: dict[str, object], arguments: list[str], rule: str, hint: str, tmp_path: Path
) -> None:
    ran = run_topo([str(model_folder(tmp_path, config)), *arguments])

    assert ran.status == 2, ran.out
    assert rule in ran.err
    assert hint in ran.err.split("→")[1]


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads"), [(2, 12, 4), (4, 12, 4), (5, 15, 5), (6, 12, 3)]
)
def test_heads_that_do_not_divide_are_padded_and_the_cost_is_told(
    tp: int, heads: int, kv_heads: int, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path, SMOLLM2)
    document = run_topo([str(folder), "-tp", str(tp), "--json"]).document
    padding = document["head_padding"]

    assert (padding["padded_heads"], padding["padded_kv_heads"]) == (heads, kv_heads)
    assert "PLAN-05" in [warning["id"] for warning in document["warnings"]]
    assert document["memory"]["num_parameters"] == 134_515_008


def test_vocabulary_and_mlp_that_do_not_divide_are_padded_and_the_cost_is_told(
    tmp_path: Path,
) -> None:
    folder = model_folder(tmp_path, SMOLLM2)
    document = run_topo([str(folder), "-tp", "5", "--json"]).document

    assert document["cut_sizes"]["vocab_size"] == 49160
    assert document["cut_sizes"]["intermediate_size"] == 1560
    told = [item["message"] for item in document["warnings"] if item["id"] == "PLAN-05"]
    assert "vocab_size 49152 to 49160" in told[1]
    assert "intermediate_size 1536 to 1560" in told[1]
    # The embedding is the head too; one layer has 3 query heads and 1 KV head of 64.
    layer = 576 * (192 + 2 * 64) + 192 * 576 + 3 * 576 * 312 + 2 * 576
    held = 30 * layer + 9832 * 576 + 576
    assert {rank["num_parameters"] for rank in document["memory"]["ranks"]} == {held}


def test_heads_that_divide_are_left_alone(tmp_path: Path) -> None:
    document = run_topo([str(model_folder(tmp_path, SMOLLM2)), "-tp", "3", "--json"]).document

    assert document["head_padding"] is None
