"""`--print-commands`: the line of each node, with hosts typed, read or set by a scheduler."""

import shlex
from pathlib import Path

import pytest

from tests.support.topo_runs import run_topo
from vcli.cli.hosts import expand_nodelist, find_hosts, read_hostfile
from vcli.topology import ConfigError

TWO_NODES = ["-tp", "8", "-pp", "2", "-n", "2", "--print-commands"]


def lines_of(arguments: list[str], engine: str, **more: object) -> list[str]:
    document = run_topo([*arguments, "--json"], **more).document  # type: ignore[arg-type]
    return [row["line"] for row in document["commands"] if row["engine"] == engine]


def test_vcli_lines_give_the_same_plan_on_every_node() -> None:
    lines = lines_of([*TWO_NODES, "--hosts", "10.0.0.1,10.0.0.2"], "vcli")

    assert lines == [
        f"vcli launch -n 2 -r {rank} --master-addr 10.0.0.1 --master-port 29501 "
        "--tensor-parallel-size 8 --pipeline-parallel-size 2 MODEL"
        for rank in (0, 1)
    ]
    words = shlex.split(lines[1])[2:-1]
    assert run_topo([*words, "--json"]).document["world_size"] == 16


def test_followers_of_vllm_are_headless_and_nothing_else_differs() -> None:
    first, second = lines_of([*TWO_NODES, "--hosts", "a,b"], "vllm")

    assert first.startswith("vllm serve MODEL --tensor-parallel-size 8")
    assert second == first.replace("--node-rank 0", "--node-rank 1") + " --headless"


def test_sglang_and_torchrun_have_their_own_flags() -> None:
    sglang = lines_of([*TWO_NODES, "--hosts", "a,b"], "sglang")
    torchrun = lines_of([*TWO_NODES, "--hosts", "fd00::1,fd00::2"], "torchrun")

    assert sglang[1].endswith(
        "--tp-size 8 --pp-size 2 --nnodes 2 --node-rank 1 --dist-init-addr a:29501"
    )
    assert torchrun[1].startswith("torchrun --nnodes 2 --nproc-per-node 8 --node-rank 1")
    ipv6 = lines_of([*TWO_NODES, "--hosts", "fd00::1,fd00::2"], "sglang")
    assert "[fd00::1]:29501" in ipv6[0]


def test_one_node_needs_no_addresses() -> None:
    arguments = ["-tp", "4", "--print-commands"]

    assert lines_of(arguments, "vcli") == ["vcli serve --tensor-parallel-size 4 MODEL"]
    assert "--standalone" in lines_of(arguments, "torchrun")[0]


def test_attention_replicas_of_sglang_are_counted_in_its_tp() -> None:
    arguments = ["-tp", "4", "-dp", "2", "--moe", "-ep", "--print-commands"]
    line = lines_of(arguments, "sglang")[0]

    assert "--tp-size 8 --dp-size 2 --enable-dp-attention --ep-size 8" in line


def test_a_plan_that_an_engine_cannot_do_says_so() -> None:
    ran = run_topo(["-tp", "4", "-dcp", "2", "--print-commands"])

    assert "# not possible: sglang has no -pcp or -dcp" in ran.out
    plans = "# not possible: vcli plans --decode-context-parallel-size and does not serve it yet"
    assert plans in ran.out
    assert "vllm serve MODEL" in ran.out


def test_instances_started_apart_get_their_first_replica() -> None:
    arguments = ["-dp", "4", "-dpl", "2", "--print-commands", "--hosts", "a,b"]
    lines = lines_of(arguments, "vllm")

    assert "--data-parallel-start-rank" not in lines[0]
    assert "--data-parallel-start-rank 2" in lines[1]
    assert lines[1].endswith("--headless")


def test_model_names_are_quoted_for_the_shell(tmp_path: Path) -> None:
    from tests.support.topo_runs import model_folder

    folder = model_folder(tmp_path / "my model; rm -rf $HOME")
    line = lines_of([str(folder), "-tp", "2", "--print-commands"], "vcli")[0]

    assert shlex.split(line)[-1] == str(folder)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ("gpu1",)),
        ("gpu[1-3]", ("gpu1", "gpu2", "gpu3")),
        ("gpu[08-10,12],login", ("gpu08", "gpu09", "gpu10", "gpu12", "login")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("a-[1-2].x,b", ("a-1.x", "a-2.x", "b")),
    ],
)
def test_slurm_node_lists_are_expanded(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize(
    "text", ["gpu[1-", "gpu]1[", "gpu[x]", "gpu[3-1]", "n[0-99999]", "", "a[[1]]"]
)
def test_damaged_node_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        expand_nodelist(text)


def test_slurm_variables_name_the_nodes() -> None:
    environ = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_NODEID": "1"}
    ran = run_topo(TWO_NODES, environ=environ)

    assert "# nodes from SLURM_JOB_NODELIST" in ran.out
    assert "# this is node 1" in ran.out
    assert "--master-addr gpu1" in ran.out


def test_leader_worker_set_variables_name_the_nodes() -> None:
    environ = {
        "LWS_LEADER_ADDRESS": "llm-0.llm.default",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "0",
    }
    document = run_topo([*TWO_NODES, "--json"], environ=environ).document

    assert document["hosts"] == ["llm-0.llm.default", "llm-0-1.llm.default"]
    assert document["node_rank"] == 0


def test_flags_go_before_the_scheduler() -> None:
    environ = {"SLURM_JOB_NODELIST": "gpu[1-2]"}
    document = run_topo([*TWO_NODES, "--hosts", "a,b", "--json"], environ=environ).document

    assert document["hosts"] == ["a", "b"]


def test_a_job_of_another_size_is_not_taken_for_the_plan(tmp_path: Path) -> None:
    found = find_hosts(
        hosts=None,
        hostfile=None,
        environ={"SLURM_JOB_NODELIST": "gpu[1-4]"},
        cwd=tmp_path,
        num_nodes=2,
        master_addr="10.0.0.9",
    )

    assert found.hosts == ("10.0.0.9", "NODE1")


def test_host_files_of_mpi_are_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# cluster\nnode1 slots=8\nnode2:8  # second\n\nfd00::1\n")

    assert read_hostfile(path) == ("node1", "node2", "fd00::1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "a"], "1 host(s) for 2 node(s)"),
        (["--hosts", "a,a"], "host a stands twice"),
        (["--hosts", "a,"], "'' is no host"),
        (["--hosts", "a,b;c"], "'b;c' is no host"),
        (["--hostfile", "/no/such"], "cannot be read"),
        (["--hosts", "a,b", "--hostfile", "x"], "exclude each other"),
    ],
)
def test_wrong_hosts_are_refused(arguments: list[str], said: str) -> None:
    ran = run_topo([*TWO_NODES, *arguments])

    assert ran.status == 2
    assert said in ran.err


def test_damaged_leader_worker_set_variables_are_refused() -> None:
    environ = {"LWS_LEADER_ADDRESS": "llm-0", "LWS_GROUP_SIZE": "many"}

    assert "LWS_GROUP_SIZE='many'" in run_topo(TWO_NODES, environ=environ).err
