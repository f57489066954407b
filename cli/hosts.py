"""The nodes of a job: from --hosts, a host file, or what Slurm and Kubernetes set."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vcli.topology import ConfigError

_MAX_HOSTS = 4096
_RANGE = re.compile(r"^([0-9]{1,18})(?:-([0-9]{1,18}))?$")
_HOST = re.compile(r"^[A-Za-z0-9._:%-]+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostList:
    """Addresses in the order of the node ranks; `source` names where they come from."""

    hosts: tuple[str, ...]
    source: str
    node_rank: int | None = None
    """Which of them this node is, where the scheduler says it."""


def find_hosts(
    *,
    hosts: str | None,
    hostfile: str | None,
    environ: Mapping[str, str],
    cwd: Path,
    num_nodes: int,
    master_addr: str,
) -> HostList:
    """The nodes; flags go before the scheduler's variables.

    Without any, node 0 is `master_addr` and the others are NODE1, NODE2...

    Raises:
        ConfigError: a name that is none, an unreadable file, or a damaged variable.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile exclude each other", hint="leave out one")
    if hosts is not None:
        return HostList(hosts=_checked(hosts.split(","), "--hosts"), source="--hosts")
    if hostfile is not None:
        return HostList(hosts=read_hostfile(Path(cwd, hostfile)), source=f"--hostfile {hostfile}")
    # A scheduler's variables are used only where they are about this plan.
    found = hosts_of_scheduler(environ)
    if found is not None and len(found.hosts) == num_nodes:
        return found
    others = tuple(f"NODE{index}" for index in range(1, num_nodes))
    first = "NODE0" if num_nodes > 1 and master_addr.startswith("127.") else master_addr
    return HostList(hosts=(first, *others), source="names to fill in")


def hosts_of_scheduler(environ: Mapping[str, str]) -> HostList | None:
    """The nodes of a Slurm job or a Kubernetes LeaderWorkerSet group, None outside of both.

    Raises:
        ConfigError: a variable that cannot be read.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if nodelist:
        rank = environ.get("SLURM_NODEID", "")
        return HostList(
            hosts=expand_nodelist(nodelist),
            source="SLURM_JOB_NODELIST",
            node_rank=int(rank) if rank.isdigit() else None,
        )
    leader, size = environ.get("LWS_LEADER_ADDRESS"), environ.get("LWS_GROUP_SIZE")
    if leader and size:
        return _leader_worker_set(leader, size, environ.get("LWS_WORKER_INDEX", ""))
    return None


def expand_nodelist(text: str) -> tuple[str, ...]:
    """`gpu[01-03,7],login` as names, as Slurm means it.

    Raises:
        ConfigError: unbalanced brackets, no number, or very many.
    """
    names: list[str] = []
    for part in _split_outside_brackets(text):
        names += _expand(part, text)
        _check_count(len(names), text)
    return _checked(names, "the node list")


def read_hostfile(path: Path) -> tuple[str, ...]:
    """One host a line; `slots=8`, `:8` and comments are allowed and left out.

    Raises:
        ConfigError: unreadable, or without a host.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"host file {path} cannot be read: {reason}", hint="a text file with one host a line"
        ) from error
    words = [line.split("#", 1)[0].split() for line in lines]
    names = [row[0] for row in words if row]
    # `host:8` counts slots; an IPv6 address has more than one colon.
    names = [name.split(":")[0] if name.count(":") == 1 else name for name in names]
    return _checked(names, f"host file {path}")


def _checked(names: list[str], source: str) -> tuple[str, ...]:
    cleaned = [name.strip() for name in names]
    if not cleaned or not all(_HOST.match(name) for name in cleaned):
        bad = next((name for name in cleaned if not _HOST.match(name)), "")
        raise ConfigError(
            f"{source}: {bad!r} is no host", hint="names or addresses, like 10.0.0.1,10.0.0.2"
        )
    return tuple(cleaned)


def _leader_worker_set(leader: str, size: str, index: str) -> HostList:
    """Pods are NAME-GROUP (leader) and NAME-GROUP-N, all beneath the same headless service."""
    if not size.isdigit() or not 1 <= int(size) <= _MAX_HOSTS:
        raise ConfigError(
            f"LWS_GROUP_SIZE={size!r} is no number of pods", hint="it is set by LeaderWorkerSet"
        )
    pod, _, domain = leader.partition(".")
    suffix = f".{domain}" if domain else ""
    workers = [f"{pod}-{number}{suffix}" for number in range(1, int(size))]
    return HostList(
        hosts=_checked([leader, *workers], "LWS_LEADER_ADDRESS"),
        source="LWS_LEADER_ADDRESS",
        node_rank=int(index) if index.isdigit() else None,
    )


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ConfigError(f"node list {text!r} has unbalanced brackets", hint="node[01-04]")
    return [*parts, text[start:]]


def _expand(part: str, whole: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    names: list[str] = []
    for item in inside.split(","):
        match = _RANGE.match(item.strip())
        if not match:
            raise ConfigError(f"node list {whole!r}: {item!r} is no range", hint="node[01-04]")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > _MAX_HOSTS:
            raise ConfigError(f"node list {whole!r}: {item!r} is no range", hint="node[01-04]")
        width = len(match[1])
        names += [f"{head}{number:0{width}d}" for number in range(first, last + 1)]
    if not tail:
        return names
    tails = _expand(tail, whole)
    _check_count(len(names) * len(tails), whole)
    return [name + end for name in names for end in tails]


def _check_count(num_names: int, nodelist: str) -> None:
    if num_names > _MAX_HOSTS:
        raise ConfigError(f"node list {nodelist!r} names more than {_MAX_HOSTS} nodes")
