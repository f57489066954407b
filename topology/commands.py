"""The exact line to type on each node: for vcli, and for the engines that people come from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vcli.topology.errors import ConfigError
from vcli.topology.sizes import EXTERNAL_LAUNCHER, ParallelSizes

Engine = Literal["vcli", "vllm", "sglang", "torchrun"]
ENGINES: Final[tuple[Engine, ...]] = ("vcli", "vllm", "sglang", "torchrun")
_MODEL_PLACEHOLDER: Final = "MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """One line for one node; empty with a `note` where the engine cannot do the plan."""

    engine: str
    node_rank: int
    host: str
    line: str
    note: str = ""


def node_commands(
    sizes: ParallelSizes, hosts: Sequence[str], *, model: str | None
) -> tuple[NodeCommand, ...]:
    """The lines of all engines on all nodes; `hosts` has an address for each node.

    Raises:
        ConfigError: another number of hosts than nodes.
    """
    if len(hosts) != sizes.num_hosts:
        raise ConfigError(
            f"{len(hosts)} host(s) for {sizes.num_hosts} node(s)",
            hint=f"--nnodes {len(hosts)}, or name {sizes.num_hosts} hosts",
        )
    if len(set(hosts)) != len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise ConfigError(
            f"host {twice} stands twice in the list of nodes",
            hint="one entry for each node; --gpus says how many ranks it gets",
        )
    named = model or _MODEL_PLACEHOLDER
    commands: list[NodeCommand] = []
    for engine in ENGINES:
        problem = _problem(engine, sizes)
        if problem:
            commands.append(
                NodeCommand(engine=engine, node_rank=0, host=hosts[0], line="", note=problem)
            )
            continue
        for node_rank, host in enumerate(hosts):
            words = list(_words(engine, sizes, node_rank, hosts[0], named))
            commands.append(
                NodeCommand(
                    engine=engine, node_rank=node_rank, host=host, line=" ".join(map(_quote, words))
                )
            )
    return tuple(commands)


def _problem(engine: Engine, sizes: ParallelSizes) -> str:
    """Why the engine cannot do the plan; empty if it can."""
    if engine == "vcli" and sizes.unserved_flags:
        return f"vcli plans {', '.join(sizes.unserved_flags)} and does not serve it yet"
    if engine != "sglang":
        return ""
    if sizes.pcp > 1 or sizes.dcp > 1:
        return "sglang has no -pcp or -dcp"
    if sizes.dp > 1 and sizes.nnodes > 1 and not sizes.is_moe:
        return "sglang joins dense replicas over nodes by a router, not by flags"
    if sizes.is_moe and sizes.dp > 1 and sizes.pp > 1:
        return "sglang's data-parallel attention is without pipeline stages"
    return ""


def _words(
    engine: Engine, sizes: ParallelSizes, node_rank: int, master: str, model: str
) -> Iterator[str]:
    if engine == "vcli":
        yield from _vcli(sizes, node_rank, master, model)
    elif engine == "vllm":
        yield from _vllm(sizes, node_rank, master, model)
    elif engine == "sglang":
        yield from _sglang(sizes, node_rank, master, model)
    else:
        yield from _torchrun(sizes, node_rank, master, model)


def _vcli(sizes: ParallelSizes, node_rank: int, master: str, model: str) -> Iterator[str]:
    is_group = sizes.nnodes > 1
    yield from ("vcli", "launch" if is_group else "serve")
    if is_group:
        yield from ("-n", str(sizes.nnodes), "-r", str(node_rank))
        yield from ("--master-addr", master, "--master-port", str(sizes.master_port))
    yield from _shared_flags(sizes)
    yield model


def _vllm(sizes: ParallelSizes, node_rank: int, master: str, model: str) -> Iterator[str]:
    yield from ("vllm", "serve", model)
    yield from _shared_flags(sizes)
    yield from _replica_flags(sizes, node_rank)
    if sizes.nnodes > 1:
        yield from ("--nnodes", str(sizes.nnodes), "--node-rank", str(node_rank))
        yield from ("--master-addr", master, "--master-port", str(sizes.master_port))
        if node_rank and not (sizes.is_hybrid_lb or sizes.is_external_lb):
            yield "--headless"
    elif sizes.num_hosts > 1:
        yield from ("--data-parallel-address", master)
        if node_rank and not (sizes.is_hybrid_lb or sizes.is_external_lb):
            yield "--headless"


def _sglang(sizes: ParallelSizes, node_rank: int, master: str, model: str) -> Iterator[str]:
    yield from ("python", "-m", "sglang.launch_server", "--model-path", model)
    # With data-parallel attention sglang counts the ranks of all replicas as tensor parallel.
    joins_replicas = sizes.is_moe and sizes.dp > 1
    tp = sizes.tp * sizes.dp if joins_replicas else sizes.tp
    for flag, size in (("--tp-size", tp), ("--pp-size", sizes.pp), ("--dp-size", sizes.dp)):
        if size > 1:
            yield from (flag, str(size))
    if joins_replicas:
        yield "--enable-dp-attention"
    if sizes.is_moe and sizes.enable_expert_parallel:
        yield from ("--ep-size", str(sizes.expert_parallel_size))
    if sizes.nnodes > 1:
        yield from ("--nnodes", str(sizes.nnodes), "--node-rank", str(node_rank))
        yield from ("--dist-init-addr", f"{_bracketed(master)}:{sizes.master_port}")


def _torchrun(sizes: ParallelSizes, node_rank: int, master: str, model: str) -> Iterator[str]:
    """Ranks of a program that joins by the usual variables, such as the external launcher."""
    nodes = sizes.num_hosts
    yield from ("torchrun", "--nnodes", str(nodes))
    yield from ("--nproc-per-node", str(sizes.world_size_across_dp // nodes))
    if nodes > 1:
        yield from ("--node-rank", str(node_rank))
        yield from ("--master-addr", master, "--master-port", str(sizes.master_port))
    else:
        yield "--standalone"
    yield from ("YOUR_SCRIPT.py", "--model", model)
    yield from _shared_flags(sizes)
    if sizes.dp > 1:
        yield from ("--data-parallel-size", str(sizes.dp))
    yield from ("--distributed-executor-backend", EXTERNAL_LAUNCHER)


def _shared_flags(sizes: ParallelSizes) -> Iterator[str]:
    named = (
        ("--tensor-parallel-size", sizes.tp),
        ("--pipeline-parallel-size", sizes.pp),
        ("--prefill-context-parallel-size", sizes.pcp),
        ("--decode-context-parallel-size", sizes.dcp),
    )
    for flag, size in named:
        if size > 1:
            yield from (flag, str(size))
    if sizes.is_moe and sizes.enable_expert_parallel:
        yield "--enable-expert-parallel"
    if sizes.enable_eplb:
        yield "--enable-eplb"


def _replica_flags(sizes: ParallelSizes, node_rank: int) -> Iterator[str]:
    if sizes.dp == 1:
        return
    yield from ("--data-parallel-size", str(sizes.dp))
    if sizes.data_parallel_size_local is not None:
        yield from ("--data-parallel-size-local", str(sizes.data_parallel_size_local))
    if sizes.is_external_lb:
        yield from ("--data-parallel-rank", str(sizes.first_data_parallel_rank_of(node_rank)))
    elif sizes.is_hybrid_lb:
        yield "--data-parallel-hybrid-lb"
    elif sizes.num_hosts > sizes.nnodes and node_rank:
        start = node_rank * sizes.local_data_parallel_size
        yield from ("--data-parallel-start-rank", str(start))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _quote(word: str) -> str:
    """As a POSIX shell needs it."""
    if word and all(char.isalnum() or char in "@%_-+=:,./[]~" for char in word):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"
