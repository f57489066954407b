"""How the ranks of one torch world find each other."""

from dataclasses import dataclass
from typing import Literal

from vcli.topology.decision import Decision
from vcli.topology.sizes import EXTERNAL_LAUNCHER, ParallelSizes

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSpec:
    """The store of one torch world.

    `file`: a FileStore on an inherited memory file, which has no name. `tcp`: a TCPStore on a
    socket that the leader binds at `host`; `port` 0 means that it publishes the port it got.
    `env`: whoever started the ranks has set the usual variables.
    """

    scheme: Literal["file", "tcp", "env"]
    host: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        """For people; what the store is really made from is decided at start."""
        if self.scheme == "file":
            return "file://<memfd>"
        if self.scheme == "env":
            return "env://"
        host = f"[{self.host}]" if ":" in self.host else self.host or "<leader>"
        return f"tcp://{host}:{self.port or '<published by the leader>'}"

    def __str__(self) -> str:
        return self.url


def choose_rendezvous(config: ParallelSizes) -> Decision[RendezvousSpec]:
    """File on one node with one engine core, tcp beyond, env under an external launcher."""
    spec, reason = _choose(config)
    return Decision(name="rendezvous", value=spec, reasons=(reason,))


def _choose(config: ParallelSizes) -> tuple[RendezvousSpec, str]:
    if config.distributed_executor_backend == EXTERNAL_LAUNCHER:
        return (
            RendezvousSpec(scheme="env"),
            "the external launcher has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE",
        )
    if config.worlds > 1 and config.nnodes_within_dp == 1:
        return (
            RendezvousSpec(scheme="file"),
            "each dense replica is a world of its own within one node",
        )
    if config.worlds > 1:
        return (
            RendezvousSpec(scheme="tcp"),
            f"each dense replica spans {config.nnodes_within_dp} nodes; its first node publishes "
            "address and port when the nodes join",
        )
    if config.nnodes > 1:
        return (
            RendezvousSpec(scheme="tcp", host=config.master_addr, port=config.master_port),
            f"one world over {config.nnodes} nodes",
        )
    replicas = config.dp * config.external_data_parallel_size
    if replicas > 1:
        return (
            RendezvousSpec(
                scheme="tcp", host=config.master_addr if config.num_hosts > 1 else LOOPBACK
            ),
            f"one world of {replicas} replicas, whose engine cores share no memory file",
        )
    return (
        RendezvousSpec(scheme="file"),
        "one world on one node: a memory file needs no port and leaves nothing behind",
    )
