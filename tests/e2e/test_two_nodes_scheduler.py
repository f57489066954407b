"""Two hosts meet that only a scheduler has told who they are."""

import sys

import pytest

from tests.support.job import VCLI, Job
from tests.support.lab import why_no_lab

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_lab()), reason=why_no_lab() or "there is a lab"),
]

PROMPT = [5, 6, 7, 8, 9]


def slurm(node_rank: int) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": str(node_rank),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "host[0-1]",
    }


def leader_worker_set(node_rank: int) -> dict[str, str]:
    return {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(node_rank),
        "LWS_LEADER_ADDRESS": "host0",
    }


@pytest.mark.parametrize(
    ("environ_of", "variable"),
    [(slurm, "SLURM_NODEID"), (leader_worker_set, "LWS_WORKER_INDEX")],
)
def test_variables_alone_bring_two_nodes_together(job: Job, environ_of, variable: str) -> None:
    leader, follower = (
        job.start(rank, "-pp", "2", environ=environ_of(rank), is_scheduled=True)
        for rank in range(2)
    )
    assert job.ask(leader.wait_serving(), PROMPT)["usage"]["completion_tokens"] == 8
    leader.wait_line(rf"node-rank 0 \({variable}\) · master-addr host0")
    follower.wait_line(rf"node-rank 1 \({variable}\) · master-addr host0")


def test_torchrun_brings_two_nodes_together(job: Job) -> None:
    address = job.hosts[0].address
    leader, follower = (
        job.start(
            rank,
            "-pp",
            "2",
            is_scheduled=True,
            program=[
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--node-rank", str(rank), "--master-addr", address, "--master-port", "29400",
                "--nproc-per-node", "1", "--no-python", *VCLI,
            ],
        )
        for rank in range(2)
    )  # fmt: skip
    assert job.ask(leader.wait_serving(), PROMPT)["usage"]["completion_tokens"] == 8
    leader.wait_line(rf"node-rank 0 \(GROUP_RANK\) · master-addr {address} \(MASTER_ADDR\)")
    follower.wait_line(rf"node-rank 1 \(GROUP_RANK\) · master-addr {address} \(MASTER_ADDR\)")


def test_a_second_process_on_a_node_is_refused(job: Job) -> None:
    node = job.start(1, "-pp", "2", environ={**slurm(1), "SLURM_LOCALID": "1"}, is_scheduled=True)
    assert node.wait_exit(60) == 2
    assert "SLURM_LOCALID=1" in node.errors[0]
    assert "srun --ntasks-per-node=1" in node.output
