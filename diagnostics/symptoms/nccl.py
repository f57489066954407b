"""NCCL between nodes: InfiniBand, RoCE, rails, faulty versions."""

from typing import Final

from vcli.diagnostics.symptoms.progress import HANGS, SERVES
from vcli.diagnostics.symptoms.symptom import Sign, Symptom

_ERROR_12: Final = Sign(
    "NET/IB", r"NET/IB ?: Got completion from peer (?P<peer>\S+) with (?:status=|error )12\b"
)

NCCL: Final = (
    Symptom(
        name="ib-names-differ",
        title="the nodes name their network cards differently",
        signs=(_ERROR_12,),
        also=((Sign(" ==> ", r"\b\w+_\d+ port \d ==> \w+"),),),
        cause="NCCL pairs cards by name, and ibdev2netdev shows that a name is another network on "
        "the other node",
        remedy="set NCCL_IB_HCA on each node to its own names of the same networks, in one order",
        reports="nccl #1170",
    ),
    Symptom(
        name="ib-completion",
        title="two network cards do not reach each other",
        signs=(_ERROR_12,),
        cause="packets to {peer} were never acknowledged (error 12): a wrong RoCE address "
        "(GID index), or cards on networks without a way between them",
        remedy="show_gids lists the indices: NCCL_IB_GID_INDEX=<RoCE v2, IPv4>, often 3; "
        "ib_write_bw between this pair of cards",
        check="IB-03",
        reports="nccl #426, pytorch #81628",
    ),
    Symptom(
        name="ib-rails",
        title="cards of different rails do not reach each other",
        signs=(
            Sign("ibv_modify_qp failed with", r"ibv_modify_qp failed with.*Connection timed out"),
        ),
        cause="the network joins only cards of the same number (rails), and NCCL connects across "
        "them",
        remedy="NCCL_CROSS_NIC=0 on all nodes",
        reports="nccl #2013",
    ),
    Symptom(
        name="ib-address",
        title="a network card has no address for RDMA",
        signs=(
            Sign(
                "ibv_modify_qp failed with",
                r"ibv_modify_qp failed with.*(?:Invalid argument|No such device|unreachable)",
            ),
        ),
        cause="the chosen GID index is empty, or of another network than the peer's",
        remedy="show_gids lists the indices: NCCL_IB_GID_INDEX=<RoCE v2, IPv4>; leave cards "
        "without one out of NCCL_IB_HCA",
        check="IB-03",
    ),
    Symptom(
        name="nccl-known-fault",
        title="this NCCL is known to hang when graphs are replayed over several nodes",
        signs=HANGS,
        also=(
            (Sign("2.28.9", r"(?:nccl==|NCCL version |nccl-cu\d+==)2\.28\.9"),),
            (Sign("nNodes ", r"nNodes [2-9]"), Sign("nnodes", r"nnodes\W+[2-9]")),
        ),
        ended_by=SERVES,
        cause="NCCL 2.28.9 deadlocks when a captured graph with collectives over several nodes is "
        "replayed",
        remedy="pip install 'nvidia-nccl-cu13>=2.30.4', or --enforce-eager",
        check="COLL-07",
        reports="vllm #52504",
    ),
    Symptom(
        name="communicator-incomplete",
        title="some ranks never finish joining an NCCL communicator",
        signs=(
            Sign("- Init START", r"(?P<key>[^\s:]+:\d+):\d+ \[\d+\].* rank (?P<rank>\d+) .*START"),
        ),
        also=((Sign("- Init COMPLETE"),), (Sign("nNodes ", r"nNodes [2-9]"),), HANGS),
        ended_by=(*SERVES, Sign("- Init COMPLETE", r"(?P<key>[^\s:]+:\d+):\d+ \[\d+\] .*COMPLETE")),
        cause="ranks finished and others, from rank {rank} on, did not: their cards have no way "
        "to the other node (a rail, a VLAN, a cable)",
        remedy="compare which local ranks finished: where it is every second one, test the card "
        "of the others (NCCL_IB_HCA=<one card>, ib_write_bw); rails alone: NCCL_CROSS_NIC=0",
        reports="vllm #58290",
    ),
)
