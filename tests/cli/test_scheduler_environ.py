"""Which node this is, from the variables that schedulers set."""

import pytest

from vcli.cli.scheduler_environ import FoundPlace, TypedPlace, find_place
from vcli.topology import ConfigError, ExitStatus

#: As `srun -N 2 --ntasks-per-node=1` of a job of three nodes sets them on its second node.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu[002-004]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
LWS = {
    "LWS_LEADER_ADDRESS": "llm-0.llm.default",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "3",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "LOCAL_WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        pytest.param(
            SLURM,
            "nnodes 2 (SLURM_STEP_NUM_NODES) · node-rank 1 (SLURM_NODEID) · "
            "master-addr gpu003 (SLURM_STEP_NODELIST)",
            id="a-step-on-a-part-of-the-job",
        ),
        pytest.param(
            {
                "SLURM_STEP_ID": "0",
                "SLURM_NODEID": "4",
                "SLURM_NNODES": "5",
                "SLURM_JOB_NUM_NODES": "6",
                "SLURM_JOB_NODELIST": "login1,gpu[003-005,010]",
                "SLURM_NODELIST": "other",
            },
            "nnodes 5 (SLURM_NNODES) · node-rank 4 (SLURM_NODEID) · "
            "master-addr login1 (SLURM_JOB_NODELIST)",
            id="slurm-without-variables-of-the-step",
        ),
        pytest.param(
            {
                "SLURM_STEP_ID": "4294967280",
                "SLURM_NODEID": "0",
                "SLURM_JOB_NUM_NODES": "6",
                "SLURM_NODELIST": "rack[1-2]n[01-03]",
            },
            "nnodes 6 (SLURM_JOB_NUM_NODES) · node-rank 0 (SLURM_NODEID) · "
            "master-addr rack1n01 (SLURM_NODELIST)",
            id="slurm-s-old-names",
        ),
        pytest.param(
            LWS,
            "nnodes 4 (LWS_GROUP_SIZE) · node-rank 3 (LWS_WORKER_INDEX) · "
            "master-addr llm-0.llm.default (LWS_LEADER_ADDRESS)",
            id="leader-worker-set",
        ),
        pytest.param(
            TORCHRUN,
            "nnodes 2 (GROUP_WORLD_SIZE) · node-rank 1 (GROUP_RANK) · "
            "master-addr 10.0.0.1 (MASTER_ADDR)",
            id="torchrun-keeps-its-port",
        ),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            "nnodes 2 (GROUP_WORLD_SIZE) · node-rank 1 (GROUP_RANK) · "
            "master-addr 10.0.0.1 (MASTER_ADDR) · master-port 29500 (MASTER_PORT)",
            id="torchrun-leaves-its-port",
        ),
        pytest.param(
            {**LWS, **SLURM, **TORCHRUN, "LOCAL_RANK": "0"},
            "nnodes 2 (GROUP_WORLD_SIZE) · node-rank 1 (GROUP_RANK) · "
            "master-addr 10.0.0.1 (MASTER_ADDR)",
            id="torchrun-inside-of-others",
        ),
        pytest.param(
            {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"},
            "nnodes 1 (SLURM_STEP_NUM_NODES)",
            id="one-node",
        ),
    ],
)
def test_each_value_comes_with_its_variable(environ: dict[str, str], said: str) -> None:
    assert str(find_place(TypedPlace(), environ)) == said


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="nothing"),
        pytest.param(without(SLURM, "SLURM_STEP_ID"), id="the-script-of-sbatch"),
        pytest.param({**SLURM, "SLURM_STEP_ID": "4294967294"}, id="the-batch-step"),
        pytest.param({**SLURM, "SLURM_STEP_ID": "4294967290"}, id="the-shell-of-salloc"),
        pytest.param(without(TORCHRUN, "TORCHELASTIC_RUN_ID"), id="MASTER_ADDR-of-the-user"),
    ],
)
def test_nothing_is_taken_where_no_scheduler_started_this_process(environ: dict[str, str]) -> None:
    assert find_place(TypedPlace(), environ) == FoundPlace()


@pytest.mark.parametrize(
    ("typed", "taken", "conflicts"),
    [
        (
            TypedPlace(nnodes=2, node_rank=0, master_addr="10.0.0.1"),
            {},
            ("SLURM_NODEID=1 but --node-rank is 0: the flag wins",),
        ),
        (
            TypedPlace(nnodes=4),
            {"node_rank": 1, "master_addr": "gpu003"},
            ("SLURM_STEP_NUM_NODES=2 but --nnodes is 4: the flag wins",),
        ),
        (
            TypedPlace(nnodes=1),
            {},
            ("SLURM_STEP_NUM_NODES=2 but --nnodes is 1: the flag wins",),
        ),
        (TypedPlace(node_rank=1), {"nnodes": 2, "master_addr": "gpu003"}, ()),
        (
            TypedPlace(master_addr="gpu004"),
            {"nnodes": 2, "node_rank": 1},
            ("SLURM_STEP_NODELIST=gpu[003-004] but --master-addr is gpu004: the flag wins",),
        ),
    ],
    ids=["all", "nnodes", "one-node", "node-rank", "master-addr"],
)
def test_a_flag_wins_and_a_contradiction_is_said(
    typed: TypedPlace, taken: dict[str, object], conflicts: tuple[str, ...]
) -> None:
    place = find_place(typed, SLURM)

    assert place.values == taken
    assert set(place.variables) == set(taken)
    assert place.conflicts == conflicts


@pytest.mark.parametrize(
    ("variable", "flag", "contradicts"),
    [
        ("gpu003", "gpu003.cluster", False),
        ("GPU003", "gpu003", False),
        ("gpu003", "gpu004", True),
        ("gpu003", "10.0.0.4", False),
        ("10.0.0.3", "gpu003", False),
        ("10.0.0.3", "10.0.0.4", True),
        ("fd00::1", "fd00:0::1", False),
        ("gpu[", "gpu003", True),
    ],
)
def test_names_and_addresses_are_only_compared_among_themselves(
    variable: str, flag: str, contradicts: bool
) -> None:
    environ = {**LWS, "LWS_LEADER_ADDRESS": variable}

    assert bool(find_place(TypedPlace(master_addr=flag), environ).conflicts) is contradicts


def test_damaged_variables_of_typed_flags_are_no_error() -> None:
    environ = {**SLURM, "SLURM_NODEID": "x", "SLURM_STEP_NUM_NODES": "", "SLURM_LOCALID": "3"}
    place = find_place(TypedPlace(nnodes=3, node_rank=2, master_addr="gpu003"), environ)

    assert place.values == {}
    assert place.conflicts == ("SLURM_NODEID=x but --node-rank is 2: the flag wins",)


@pytest.mark.parametrize(
    ("environ", "said", "hint"),
    [
        ({**SLURM, "SLURM_STEP_NUM_NODES": "two"}, "SLURM_STEP_NUM_NODES='two'", "--nnodes"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "0"}, "'0' must be a number in 1..", "--nnodes"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "9" * 5000}, "must be a number in 1..", "--nnodes"),
        ({**SLURM, "SLURM_NODEID": "-1"}, "SLURM_NODEID='-1' must be a number in 0..1", "-rank"),
        ({**SLURM, "SLURM_NODEID": "²"}, "SLURM_NODEID='²'", "--node-rank"),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID='2' must be a number in 0..1", "-rank"),
        (without(SLURM, "SLURM_NODEID"), "SLURM_NODEID is not set, although SLURM_STEP_ID=3", "-r"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[3-"}, "SLURM_STEP_NODELIST: node list", "--master"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a b"}, "'a b' is no host", "--master-addr"),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "a[0-4000]b[0-4000]c[0-4000]"},
            "names more than 4096 nodes",
            "--master-addr",
        ),
        ({**SLURM, "SLURM_STEP_NODELIST": f"a[{'1' * 5000}]"}, "is no range", "--master-addr"),
        ({**SLURM, "SLURM_LOCALID": "1"}, "SLURM_LOCALID=1", "srun --ntasks-per-node=1"),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,2(x3)"},
            "SLURM_STEP_TASKS_PER_NODE=1,2(x3) means several processes on a node",
            "srun --ntasks-per-node=1",
        ),
        (
            {**without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE": "8"},
            "SLURM_NTASKS_PER_NODE=8",
            "srun --ntasks-per-node=1",
        ),
        (without(LWS, "LWS_GROUP_SIZE"), "LWS_GROUP_SIZE is not set", "--nnodes"),
        (without(LWS, "LWS_WORKER_INDEX"), "LWS_WORKER_INDEX is not set", "--node-rank"),
        (without(LWS, "LWS_LEADER_ADDRESS"), "LWS_LEADER_ADDRESS is not set", "--master-addr"),
        ({**LWS, "LWS_WORKER_INDEX": "4"}, "LWS_WORKER_INDEX='4' must be a number in 0..3", "-r"),
        (without(TORCHRUN, "GROUP_RANK"), "GROUP_RANK is not set", "--node-rank"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2", "--nproc-per-node 1"),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, "LOCAL_RANK=1", "--nproc-per-node 1"),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": "65535"},
            "MASTER_PORT='65535' must be a number in 1..65534",
            "--master-port",
        ),
    ],
)
def test_what_cannot_be_used_is_named_with_the_way_out(
    environ: dict[str, str], said: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_place(TypedPlace(), environ)

    assert said in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_status == ExitStatus.USAGE


def test_tasks_of_the_step_count_more_than_those_of_the_job() -> None:
    environ = {**SLURM, "SLURM_NTASKS_PER_NODE": "8"}

    assert find_place(TypedPlace(), environ).values["node_rank"] == 1
