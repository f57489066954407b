"""ENV: variables that steer the libraries below."""

import difflib
from collections.abc import Iterator
from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.checks.variables import KNOWN_PREFIXES, KNOWN_VARIABLES, LEFTOVER_SWITCHES
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.network import INTERFACE_VARIABLES, parse_interface_rule
from vcli.diagnostics.sockets import is_loopback
from vcli.diagnostics.text import listing

_UNSET: Final = Remedy(
    bare_metal="unset {variables}",
    docker="leave out -e {variables} (or ENV in the image)",
    kubernetes="remove env {variables} from the container",
    slurm="unset {variables}   in the job script, and srun --export=ALL",
)


@check(
    "ENV-01",
    "no misspelt variable",
    why="a library ignores a variable that it does not know, without a word",
    expected="names that NCCL, gloo, torch or vcli know",
    remedy=Remedy(bare_metal="export {right}=…; unset {wrong}"),
)
def misspelt(context: CheckContext) -> Finding:
    """Compares variables that begin like one of NCCL, gloo, torch or vcli with the known ones.

    Warns only where a known name lies within two letters, so that new variables are left alone.
    """
    found: list[tuple[str, str]] = []
    for name in sorted(context.environ):
        if name in KNOWN_VARIABLES or not name.startswith(KNOWN_PREFIXES):
            continue
        near = difflib.get_close_matches(name, KNOWN_VARIABLES, n=1, cutoff=0.7)
        if near and edit_distance(name, near[0]) <= 2:
            found.append((name, near[0]))
    if not found:
        return passed("no misspelt variable")
    wrong, right = found[0]
    return warned(
        listing([f"{name} (did you mean {other}?)" for name, other in found]),
        values={"wrong": wrong, "right": right},
    )


def edit_distance(first: str, second: str) -> int:
    """Letters to insert, delete or replace to get from one word to the other."""
    row = list(range(len(second) + 1))
    for position, letter in enumerate(first, 1):
        previous, row[0] = row[0], position
        for column, other in enumerate(second, 1):
            previous, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, previous + (letter != other)),
            )
    return row[-1]


@check(
    "ENV-02",
    "interface variables name real interfaces",
    why="NCCL and gloo find no interface and end the start after minutes, or talk to themselves",
    expected="at least one interface of this host that the other nodes reach",
    remedy=Remedy(
        bare_metal="export {variable}={interface}",
        docker="docker run -e {variable}={interface} …",
        kubernetes="env {variable}: {interface}",
        slurm="export {variable}={interface}   in the job script (or unset it there)",
    ),
    is_preflight=True,
)
def interface_variables(context: CheckContext) -> Finding:
    """Applies NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME to this host.

    NCCL's grammar (prefixes, `=` exact, `^` all but) and the exact names of the others are
    followed. A variable that leaves no interface fails; one that leaves only loopback warns with
    more than one node.
    """
    interfaces = context.network.interface_names()
    said: list[str] = []
    loopback_only: tuple[str, str] | None = None
    for variable, has_prefixes in INTERFACE_VARIABLES.items():
        value = context.environ.get(variable, "")
        if not value:
            continue
        rule = parse_interface_rule(value, has_prefixes=has_prefixes)
        chosen = rule.matches(interfaces)
        wrong = () if has_prefixes else rule.unmatched(interfaces)
        if not chosen or wrong:
            return failed(
                f"{variable}={value} fits none of {', '.join(interfaces)}"
                if not chosen
                else f"{variable} names {', '.join(wrong)}, this host has {', '.join(interfaces)}",
                values={"variable": variable, "interface": suggested_interface(context)},
            )
        if set(chosen) <= {"lo"}:
            loopback_only = (variable, value)
        said.append(f"{variable} → {', '.join(chosen)}")
    if loopback_only and context.nnodes > 1:
        variable, value = loopback_only
        return warned(
            f"{variable}={value} leaves only loopback, the plan has {context.nnodes} nodes",
            values={"variable": variable, "interface": suggested_interface(context)},
        )
    return passed("; ".join(said) or "none is set")


def suggested_interface(context: CheckContext) -> str:
    """The interface toward node 0, else the first that is up and not loopback."""
    master = context.plan.config.master_addr
    toward = None if is_loopback(master) else context.network.address_toward(master)
    outside = [nic for nic in context.host.nics if not nic.is_loopback and nic.is_up]
    for nic in outside:
        if toward in nic.addresses:
            return nic.name
    with_address = [nic.name for nic in outside if nic.addresses]
    if with_address:
        return with_address[0]
    names = [name for name in context.network.interface_names() if name != "lo"]
    return next((name for name in names if _is_up(context, name)), "INTERFACE")


def _is_up(context: CheckContext, name: str) -> bool:
    return context.files.read_words(f"/sys/class/net/{name}/operstate") == ["up"]


@check(
    "ENV-03",
    "no left-over debugging switch",
    why="it was set to hunt a bug, and makes every step slower since",
    expected="none of the switches that cost speed",
    remedy=_UNSET,
)
def leftover_switches(context: CheckContext) -> Finding:
    """Looks for switches that turn fast paths off or trace every call."""
    found: list[tuple[str, str]] = []
    for name, (values, cost) in LEFTOVER_SWITCHES.items():
        value = context.environ.get(name)
        if value is not None and (value.upper() in values or not values):
            found.append((name, f"{name}={value} ({cost})"))
    if not found:
        return passed("none is set")
    return warned(
        listing([text for _, text in found]),
        values={"variables": " ".join(name for name, _ in found)},
    )


@check(
    "ENV-04",
    "proxies leave the nodes alone",
    why="HTTP between the nodes and from clients goes to the proxy, which does not know them",
    expected="node addresses in no_proxy where a proxy is set",
    remedy=Remedy(
        bare_metal="export no_proxy={no_proxy} NO_PROXY={no_proxy}",
        docker="docker run -e no_proxy={no_proxy} -e NO_PROXY={no_proxy} …",
        kubernetes="env no_proxy and NO_PROXY: {no_proxy}",
    ),
)
def proxies(context: CheckContext) -> Finding:
    """With several nodes, checks that no_proxy covers node 0's address where a proxy is set."""
    environ = context.environ
    proxy = next(
        (
            environ[name]
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
            if environ.get(name)
        ),
        None,
    )
    if proxy is None:
        return passed("no proxy for HTTP")
    if context.nnodes == 1:
        return passed(f"proxy {proxy}; one node")
    listed = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    master = context.plan.config.master_addr
    if _is_excepted(master, listed):
        return passed(f"no_proxy covers {master}")
    return warned(
        f"a proxy is set ({proxy}), and no_proxy lacks {master}",
        values={"no_proxy": ",".join(part for part in (listed, master) if part)},
    )


def _is_excepted(host: str, listed: str) -> bool:
    names = [part.strip().lstrip("*").lstrip(".") for part in listed.split(",") if part.strip()]
    return "" in names or any(host == name or host.endswith(f".{name}") for name in names)


@check(
    "ENV-05",
    "launcher variables agree with the flags",
    why="the variables of another launcher say something else than what was typed; the flags win",
    expected="equal values, or only one of the two",
    remedy=Remedy(
        bare_metal="unset {variables}   or type the flags that they mean: {flags}",
        slurm="vcli … {flags}   (or unset {variables})",
    ),
)
def launcher_variables(context: CheckContext) -> Finding:
    """Compares the variables of torchrun, Slurm and MPI with the sizes of the plan."""
    config = context.plan.config
    world = context.plan.world_size_across_dp
    compared: dict[str, tuple[object, str]] = {
        "SLURM_NNODES": (config.nnodes, "--nnodes"),
        "SLURM_NODEID": (config.node_rank, "--node-rank"),
        "GROUP_WORLD_SIZE": (config.nnodes, "--nnodes"),
        "GROUP_RANK": (config.node_rank, "--node-rank"),
        "NODE_RANK": (config.node_rank, "--node-rank"),
        "WORLD_SIZE": (world, ""),
        "OMPI_COMM_WORLD_SIZE": (world, ""),
    }
    if config.nnodes > 1:
        compared["MASTER_ADDR"] = (config.master_addr, "--master-addr")
        compared["MASTER_PORT"] = (config.master_port, "--master-port")
    present = {name: context.environ[name] for name in compared if context.environ.get(name)}
    if not present:
        return skipped("no launcher has set variables")
    differing = [name for name, value in present.items() if value != str(compared[name][0])]
    if not differing:
        return passed(f"{', '.join(present)} agree")
    return warned(
        listing([f"{name}={present[name]} but {_meaning(compared[name])}" for name in differing]),
        values={
            "variables": " ".join(differing),
            "flags": " ".join(_flags(differing, present, compared)) or "-tp, -pp, -dp",
        },
    )


def _meaning(pair: tuple[object, str]) -> str:
    value, flag = pair
    return f"{flag} is {value}" if flag else f"the plan has {value} ranks"


def _flags(
    names: list[str], present: dict[str, str], compared: dict[str, tuple[object, str]]
) -> Iterator[str]:
    for name in names:
        if compared[name][1]:
            yield f"{compared[name][1]} {present[name]}"


CHECKS = (
    misspelt,
    interface_variables,
    leftover_switches,
    proxies,
    launcher_variables,
)
