"""NET: addresses, names and ports of this host."""

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.context import CheckContext, PortUse
from vcli.diagnostics.holders import find_holder
from vcli.diagnostics.sockets import is_loopback
from vcli.diagnostics.text import listing
from vcli.topology import NicFacts

_ONE_NODE = "one node"
_PORTS_TRIED = 50
_REACHABLE = Remedy(
    bare_metal="on all nodes the same --master-addr ADDRESS, an address of node 0 that the others "
    "reach; {where}",
)


@check(
    "NET-01",
    "own address toward node 0",
    why="the other nodes connect back to this address",
    expected="a route to --master-addr over an interface that the other nodes reach",
    remedy=Remedy(
        bare_metal="name node 0 by an address that `ip route get {master}` shows a route to: "
        "--master-addr ADDRESS",
        docker="docker run --network host …, and --master-addr with the host's address",
        kubernetes="hostNetwork: true, or the pod IP of node 0 as --master-addr",
        slurm="--master-addr $(scontrol show hostnames $SLURM_NODELIST | head -1)",
    ),
    requires=("NET-02",),
    is_preflight=True,
)
def own_address(context: CheckContext) -> Finding:
    """Asks the kernel which of this host's addresses it would use toward node 0; sends nothing.

    Fails where there is no route, or where the answer is loopback though there are several nodes.
    Says interface, speed and MTU.
    """
    if context.nnodes == 1:
        return skipped(_ONE_NODE)
    master = context.plan.config.master_addr
    values = {"master": master}
    addresses = [master] if _is_literal(master) else list(context.network.addresses_of(master))
    toward = [found for item in addresses if (found := context.network.address_toward(item))]
    if not toward:
        return failed(f"no route to {master}", values=values, is_typed=True)
    if is_loopback(toward[0]):
        return failed(
            f"{toward[0]} toward {master}: the other {context.nnodes - 1} node(s) cannot reach it",
            remedy=_REACHABLE,
            values={"where": _where(context)},
            is_typed=True,
        )
    nic = _nic_of(context, toward[0])
    return passed(f"{toward[0]} toward {master}{_nic_text(nic)}")


def _is_literal(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


def _own_addresses(context: CheckContext) -> list[tuple[str, str]]:
    """Addresses of this host that others may reach, with the interface of each."""
    return [
        (address, nic.name)
        for nic in context.host.nics
        for address in nic.addresses
        if nic.is_up and not is_loopback(address) and not address.startswith("fe80")
    ]


def _where(context: CheckContext) -> str:
    """Where the address of node 0 is found."""
    own = listing([f"{address} ({name})" for address, name in _own_addresses(context)])
    if context.plan.config.own_node_rank:
        return f"on node 0 `ip -br addr` shows them; this host, not node 0, has {own or 'none'}"
    return f"this host has {own or 'none'}"


def _nic_of(context: CheckContext, address: str) -> NicFacts | None:
    return next((nic for nic in context.host.nics if address in nic.addresses), None)


def _nic_text(nic: NicFacts | None) -> str:
    if nic is None:
        return ""
    speed = f", {nic.speed_mbit / 1000:g} Gbit/s" if nic.speed_mbit else ""
    return f" ({nic.name}{speed}{f', MTU {nic.mtu}' if nic.mtu else ''})"


@check(
    "NET-02",
    "name of node 0",
    why="every node looks for node 0 under this name",
    expected="a name that resolves within a second, on other nodes to another host than themselves",
    remedy=Remedy(
        bare_metal="use the address instead of the name: --master-addr ADDRESS",
        kubernetes="use the headless service's name of pod 0, or its IP: --master-addr IP",
    ),
    deadline_s=1.8,
    is_preflight=True,
)
def master_name(context: CheckContext) -> Finding:
    """Resolves --master-addr.

    Fails where it has no address, or only loopback ones on a node that is not node 0. Warns where
    the answer took more than a second.
    """
    if context.nnodes == 1:
        return skipped(_ONE_NODE)
    config = context.plan.config
    master = config.master_addr
    begin = context.clock()
    found = (master,) if _is_literal(master) else context.network.addresses_of(master)
    seconds = context.clock() - begin
    if not found:
        return failed(f"{master} does not resolve", is_typed=True)
    text = master if found == (master,) else f"{master} is {listing(found)}"
    if config.own_node_rank > 0 and all(is_loopback(address) for address in found):
        return failed(
            f"{text} on node {config.own_node_rank}: that is this host itself",
            remedy=_REACHABLE,
            values={"where": _where(context)},
            is_typed=True,
        )
    if seconds > 1.0:
        return warned(f"{text}, after {seconds:.1f} s")
    return passed(text)


@check(
    "NET-03",
    "node 0 has the address of node 0",
    why="node 0 listens there, and elsewhere nobody would find it",
    expected="--master-addr is an address of this host where --node-rank is 0",
    remedy=Remedy(
        bare_metal="--master-addr {own}   or start this host with another --node-rank",
    ),
    requires=("NET-02",),
    is_preflight=True,
)
def owns_master(context: CheckContext) -> Finding:
    """On node 0, binds a socket to --master-addr (any port) and closes it again."""
    if context.nnodes == 1:
        return skipped(_ONE_NODE)
    config = context.plan.config
    if config.own_node_rank:
        return skipped(f"this is node {config.own_node_rank}")
    master = config.master_addr
    found = (master,) if _is_literal(master) else context.network.addresses_of(master)
    if any(context.network.is_local(address) for address in found):
        return passed(f"{master} is this host's")
    own = [address for address, _ in _own_addresses(context)]
    return failed(
        f"{master} is no address of this host, which has {listing(own) or 'none'}",
        values={"own": own[0] if own else "ADDRESS"},
        is_typed=True,
    )


@check(
    "NET-04",
    "ports are free",
    why="a server or a rank that finds its port taken cannot start, or meets another job there",
    expected="nobody listens on the ports that this node will use",
    remedy=Remedy(bare_metal="{flag} {free}   or stop {holder}"),
    is_preflight=True,
)
def free_ports(context: CheckContext) -> Finding:
    """Binds each port that this node would listen on, and closes it again.

    A port that was typed, or that the nodes must agree on, fails where somebody has it; a default
    one warns. Names who has it, and the next free port.
    """
    if not context.ports:
        return skipped("no fixed port is used")
    taken = [use for use in context.ports if _is_taken(context, use)]
    if not taken:
        return passed(listing([f"{use.port} ({use.purpose})" for use in context.ports]) + " free")
    taken.sort(key=lambda use: not use.is_typed)
    first = taken[0]
    texts = [_taken_text(context, use) for use in taken]
    holder = find_holder(context.files, first.port)
    values = {
        "flag": first.flag,
        "free": _next_free(context, first) or 0,
        "holder": f"it: kill {holder.pid}" if holder else "the process that has it",
    }
    if first.is_typed:
        return failed(listing(texts), values=values, is_typed=True)
    return warned(listing(texts), values=values)


def _is_taken(context: CheckContext, use: PortUse) -> bool:
    problem = context.network.bind_problem(use.address, use.port)
    return problem is not None and problem.is_in_use


def _taken_text(context: CheckContext, use: PortUse) -> str:
    holder = find_holder(context.files, use.port)
    who = holder.describe() if holder else "another process"
    return f"port {use.port} ({use.purpose}) is in use by {who}"


def _next_free(context: CheckContext, use: PortUse) -> int | None:
    used = {item.port for item in context.ports}
    for port in range(use.port + 1, min(use.port + _PORTS_TRIED, 65536)):
        if port not in used and context.network.bind_problem(use.address, port) is None:
            return port
    return None


CHECKS = (own_address, master_name, owns_master, free_ports)
