"""LIM: what zmq allows, which carries the control messages between nodes."""

from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, skipped
from vcli.diagnostics.context import CheckContext

#: An endpoint has a socket and a monitor; a launcher and an engine core have one each.
SOCKETS_PER_PROCESS: Final = 8


@check(
    "LIM-07",
    "zmq between nodes",
    why="a launch over nodes ends when its first socket cannot be made or encrypted",
    expected="8 sockets in a context, and CURVE, which encrypts what nodes say to each other",
    remedy=Remedy(bare_metal="pip install --force-reinstall --only-binary :all: pyzmq"),
)
def zmq_ceilings(context: CheckContext) -> Finding:
    """Asks libzmq for the most sockets of a context and for CURVE.

    One socket serves all nodes, so that the number of nodes does not count here; their connections
    are open files (LIM-05). A launch on one node uses no zmq.
    """
    if context.nnodes == 1:
        return skipped("one node")
    limits = context.zmq_limits()
    if limits is None:
        return failed("pyzmq is not installed", remedy="pip install pyzmq")
    text = f"zmq {limits.version}, {limits.max_sockets} sockets in a context"
    if not limits.has_curve:
        return failed(f"{text}, built without CURVE")
    if limits.max_sockets < SOCKETS_PER_PROCESS:
        return failed(f"{text}, {SOCKETS_PER_PROCESS} needed")
    return passed(f"{text}, CURVE")


CHECKS = (zmq_ceilings,)
