"""NET: families, MTU and health of this host's interfaces, and what is open to others."""

import ipaddress
from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.sockets import is_loopback
from vcli.diagnostics.text import listing
from vcli.topology import NicFacts

_ONE_NODE: Final = "one node"
_COUNTERS: Final = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")


@check(
    "NET-05",
    "address families",
    why="two sides without a common family never meet",
    expected="an own address of the family of --master-addr",
    remedy=Remedy(
        bare_metal="name node 0 by an IPv{other} address: --master-addr ADDRESS   (and export "
        "NCCL_SOCKET_FAMILY=AF_INET{suffix})",
    ),
    requires=("NET-02",),
)
def families(context: CheckContext) -> Finding:
    """Compares the families of node 0's addresses with those of this host's interfaces."""
    if context.nnodes == 1:
        return skipped(_ONE_NODE)
    master = context.plan.config.master_addr
    theirs = {_family(address) for address in context.network.addresses_of(master) or (master,)}
    own = {
        _family(address)
        for nic in context.host.nics
        for address in nic.addresses
        if not is_loopback(address) and not address.startswith("fe80")
    }
    theirs.discard(0)
    if not own or not theirs:
        return skipped("no addresses to compare")
    if not own & theirs:
        other = min(own)
        return failed(
            f"{master} is IPv{min(theirs)}, this host has IPv{other} only",
            values={"other": other, "suffix": "6" if other == 6 else ""},
        )
    return passed(", ".join(f"IPv{family}" for family in sorted(own & theirs)))


def _family(address: str) -> int:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 0
    mapped = getattr(parsed, "ipv4_mapped", None)
    return 4 if mapped else parsed.version


@check(
    "NET-10",
    "one MTU",
    why="cards of different MTU on one path drop large packets without a word",
    expected="equal MTUs on the cards that carry the ranks' traffic",
    remedy=Remedy(
        bare_metal="sudo ip link set {interface} mtu {mtu}   (and the same on the switch)",
        docker="docker network create -o com.docker.network.driver.mtu={mtu} …, or --network host",
    ),
)
def mtu(context: CheckContext) -> Finding:
    """Compares the MTUs of the RDMA cards, and of interfaces of equal speed, with several nodes."""
    if context.nnodes == 1:
        return skipped(_ONE_NODE)
    classes: dict[object, list[NicFacts]] = {}
    for nic in context.host.nics:
        if nic.is_up and not nic.is_loopback and nic.addresses and nic.mtu:
            key = "rdma" if nic.rdma_device else nic.speed_mbit
            if key:
                classes.setdefault(key, []).append(nic)
    for nics in classes.values():
        sizes = {nic.mtu or 0 for nic in nics}
        if len(sizes) > 1:
            small = min(nics, key=lambda nic: nic.mtu or 0)
            return warned(
                listing([f"{nic.name} {nic.mtu}" for nic in nics]),
                values={"interface": small.name, "mtu": max(sizes)},
            )
    shown = [f"{nic.name} {nic.mtu}" for nics in classes.values() for nic in nics]
    return passed(listing(shown) or "one interface")


@check(
    "NET-13",
    "interface is up and clean",
    why="errors on the wire are sent again, and every collective waits for them",
    expected="the chosen interface up, its error counters still",
    remedy=Remedy(
        bare_metal="sudo ip link set {interface} up; ethtool {interface}; check cable and "
        "switch port",
    ),
    deadline_s=4.0,
)
def health(context: CheckContext) -> Finding:
    """Reads the state of the interface toward node 0, and its error counters twice in 0.2 s."""
    if context.nnodes == 1:
        return skipped(_ONE_NODE)
    master = context.plan.config.master_addr
    toward = context.network.address_toward(master) if not is_loopback(master) else None
    nic = next((nic for nic in context.host.nics if toward in nic.addresses), None)
    if nic is None or nic.is_loopback:
        return skipped("the interface toward node 0 is not known")
    values = {"interface": nic.name}
    state = (context.files.read(f"/sys/class/net/{nic.name}/operstate") or "unknown").strip()
    if state not in ("up", "unknown"):
        return failed(f"{nic.name} is {state}", values=values)
    before = _counters(context, nic.name)
    context.pause(0.2)
    after = _counters(context, nic.name)
    grown = [f"{name} +{after[name] - count}" for name, count in before.items()
             if after.get(name, count) > count]  # fmt: skip
    if grown:
        return warned(f"{nic.name}: {listing(grown)} in 0.2 s", values=values)
    return passed(f"{nic.name} is up")


def _counters(context: CheckContext, name: str) -> dict[str, int]:
    found = {}
    for counter in _COUNTERS:
        value = context.files.read_int(f"/sys/class/net/{name}/statistics/{counter}")
        if value is not None:
            found[counter] = value
    return found


@check(
    "NET-14",
    "nothing open to strangers",
    why="whoever reaches the port can send requests, and join a job without a token",
    expected="HTTP on 127.0.0.1 or behind a proxy, a job token with several nodes",
    remedy=Remedy(
        bare_metal="{fix}",
    ),
)
def exposure(context: CheckContext) -> Finding:
    """Looks at the address that HTTP would listen on, and for a job token with several nodes.

    Warns where a wildcard or public address is asked for, and where nodes would join without a
    token: the fixed key keeps nobody out.
    """
    fix = "--host 127.0.0.1, or a firewall in front"
    problems = [
        (f"HTTP on {use.address} is reachable from outside", fix)
        for use in context.ports
        if use.purpose == "HTTP" and _is_open(context, use.address)
    ]
    if context.nnodes > 1 and not context.environ.get("VCLI_JOB_TOKEN"):
        problems.append(
            ("nodes join without a token",
             "export VCLI_JOB_TOKEN=$(openssl rand -hex 16)   (the same on all nodes)")
        )  # fmt: skip
    if problems:
        return warned(listing([text for text, _ in problems]), values={"fix": problems[0][1]})
    return passed("HTTP on this host only" if context.ports else "no port is open")


def _is_open(context: CheckContext, address: str) -> bool:
    if address in ("0.0.0.0", "::", ""):
        own = [item for nic in context.host.nics for item in nic.addresses]
        return any(_is_public(item) for item in own)
    return _is_public(address)


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


CHECKS = (families, mtu, health, exposure)
