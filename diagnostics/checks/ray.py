"""RAY: what Ray needs of this host, and what its node here says, where it is used."""

import os
from typing import Final

from vcli.diagnostics.check import (
    Finding,
    Remedy,
    check,
    failed,
    passed,
    skipped,
    unknown,
    warned,
)
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.ray_node import RayNode, cluster_address, find_ray_nodes, tcp_problem
from vcli.diagnostics.text import listing, plural, size_text

#: Part of the memory that Ray's object store takes by default, in /dev/shm.
OBJECT_STORE_PART: Final = 0.3
_NOT_USED: Final = "Ray is not used"
_NO_NODE: Final = "no Ray node runs on this host"
_PREFIXES: Final = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_DEVICE_ORDER")
#: Variables that may differ between processes that work together.
_HARMLESS: Final = ("NCCL_DEBUG", "NCCL_RAS_")


def _is_used(context: CheckContext) -> bool:
    return context.plan.backend.value == "ray" or bool(context.environ.get("RAY_ADDRESS"))


def _node(context: CheckContext) -> RayNode | None:
    nodes = find_ray_nodes(context.files)
    return nodes[0] if nodes else None


@check(
    "RAY-01",
    "Ray's version",
    why="Ray refuses a driver of another version, and pickles break over versions of Python",
    expected="ray installed here, in the version and for the Python of the node on this host",
    remedy=Remedy(
        bare_metal="pip install 'ray=={version}', with Python {python}: start Ray and vcli from "
        "the same environment",
        docker="start Ray and vcli from the same image",
    ),
)
def version(context: CheckContext) -> Finding:
    """Compares the installed distribution with the one that the raylet on this host runs from."""
    if not _is_used(context):
        return skipped(_NOT_USED)
    own = context.packages.version("ray")
    node = _node(context)
    own_python = ".".join(map(str, context.interpreter.version[:2]))
    values = {"version": (node.version if node else "") or "2.*",
              "python": (node.python if node else "") or own_python}  # fmt: skip
    if own is None:
        return failed("ray is not installed here", remedy="pip install ray")
    if node is None:
        return passed(f"ray {own}; {_NO_NODE}")
    if node.version and node.version != own:
        return failed(f"ray {own} here, {node.version} on the node", values=values)
    if node.python and node.python != own_python:
        return failed(f"Python {own_python} here, {node.python} on the node", values=values)
    return passed(f"ray {own}, Python {own_python}")


@check(
    "RAY-02",
    "Ray's cluster answers",
    why="the driver waits for it, and then starts a cluster of its own without the other nodes",
    expected="a connection to the head's control store (GCS)",
    remedy=Remedy(
        bare_metal="on the head: ray start --head --port {port}; elsewhere: ray start --address "
        "{host}:{port}"
    ),
    deadline_s=4.0,
)
def cluster(context: CheckContext) -> Finding:
    """Connects to RAY_ADDRESS, else to the cluster that was started on this host.

    Without any, Ray starts a cluster of this host alone, which is enough for one node.
    """
    if not _is_used(context):
        return skipped(_NOT_USED)
    address = cluster_address(context.environ, context.files)
    if address is None:
        if context.nnodes > 1:
            return failed(
                f"no cluster is known here, the plan has {context.nnodes} nodes",
                values={"host": context.plan.config.master_addr, "port": 6379},
            )
        return passed("no cluster: Ray would start one of this host")
    host, port = address
    problem = tcp_problem(host, port)
    if problem:
        return failed(f"{host}:{port}: {problem}", values={"host": host, "port": port})
    return passed(f"{host}:{port} answers")


@check(
    "RAY-03",
    "Ray's address of this host",
    why="ranks are placed by the resource node:<ip>, which does not exist under another address",
    expected="the address of this host toward the other nodes",
    remedy=Remedy(
        bare_metal="ray stop; ray start --node-ip-address {own} --address HEAD:6379   (--head on "
        "the first node)"
    ),
)
def node_address(context: CheckContext) -> Finding:
    """Compares --node_ip_address of the raylet here with the route to node 0."""
    if not _is_used(context):
        return skipped(_NOT_USED)
    node = _node(context)
    if node is None or not node.node_ip:
        return skipped(_NO_NODE)
    own = context.network.address_toward(context.plan.config.master_addr)
    if not context.network.is_local(node.node_ip):
        return failed(
            f"Ray has {node.node_ip}, which is no address of this host",
            values={"own": own or "ADDRESS"},
        )
    if context.nnodes > 1 and own != node.node_ip:
        return failed(
            f"Ray has {node.node_ip}, the way to node 0 begins at {own}",
            values={"own": own or "ADDRESS"},
        )
    return passed(node.node_ip)


@check(
    "RAY-04",
    "GPUs that Ray may give",
    why="the placement group waits for ever for GPUs that the node does not offer",
    expected="as many GPUs as ranks on this node",
    remedy=Remedy(bare_metal="ray stop; ray start --num-gpus {count} …   (or --head)"),
)
def node_gpus(context: CheckContext) -> Finding:
    """Reads what the raylet on this host was started with; who holds them `ray status` tells."""
    if not _is_used(context):
        return skipped(_NOT_USED)
    node = _node(context)
    if node is None or node.num_gpus is None:
        return skipped(_NO_NODE)
    if not context.is_cuda:
        return skipped("planned for the CPU")
    count = len(context.local_ranks)
    if node.num_gpus < count:
        return failed(f"{node.num_gpus:g} GPUs for {plural(count, 'rank')}",
                      values={"count": count})  # fmt: skip
    return passed(f"{node.num_gpus:g} GPUs for {plural(count, 'rank')}")


@check(
    "RAY-05",
    "variables reach Ray's workers",
    why="workers have the environment of the raylet, not of the driver, and NCCL's must agree",
    expected="equal NCCL_, GLOO_ and CUDA order variables in the raylet and here",
    remedy=Remedy(bare_metal="ray stop; export {variable}={value}; ray start …   (on each node)"),
)
def node_environ(context: CheckContext) -> Finding:
    """Reads the environment of the raylet on this host, which its workers inherit."""
    if not _is_used(context):
        return skipped(_NOT_USED)
    node = _node(context)
    if node is None:
        return skipped(_NO_NODE)
    if node.environ is None:
        return unknown(f"the environment of the raylet (pid {node.pid}) cannot be read",
                       remedy=f"sudo cat /proc/{node.pid}/environ")  # fmt: skip
    names = sorted(
        name
        for name in {*node.environ, *context.environ}
        if name.startswith(_PREFIXES) and not name.startswith(_HARMLESS)
        and node.environ.get(name) != context.environ.get(name)
    )  # fmt: skip
    if names:
        text = listing([f"{name}: {context.environ.get(name, 'not set')} here, "
                        f"{node.environ.get(name, 'not set')} there"
                        for name in names])  # fmt: skip
        value = context.environ.get(names[0], "''")
        return failed(text, values={"variable": names[0], "value": value})
    return passed("equal")


@check(
    "RAY-06",
    "room for Ray's object store",
    why="Ray falls back to a folder on disk, and every transfer becomes slow",
    expected="30 % of the memory free in /dev/shm",
    remedy=Remedy(
        bare_metal="sudo mount -o remount,size={size} /dev/shm   (or ray start "
        "--object-store-memory BYTES)",
        docker="docker run --shm-size={size} …",
        kubernetes="an emptyDir with medium: Memory and sizeLimit: {quantity} at /dev/shm",
    ),
)
def object_store(context: CheckContext) -> Finding:
    """Compares /dev/shm with the memory of this host, where Ray is used.

    That is: Ray is the back end, or RAY_ADDRESS is set.
    """
    if not _is_used(context):
        return skipped(_NOT_USED)
    total = context.host.memory_total_bytes
    if total is None:
        return skipped("the system does not say how much memory it has")
    status = os.statvfs(context.files.path("/dev/shm"))
    free, need = status.f_bavail * status.f_frsize, int(OBJECT_STORE_PART * total)
    if free < need:
        return warned(
            f"{size_text(free)} free in /dev/shm, {size_text(need)} wanted",
            values={
                "size": f"{-(-need // 1024**3)}G",
                "quantity": f"{-(-need // 1024**3)}Gi",
            },
        )
    return passed(f"{size_text(free)} free in /dev/shm")


@check(
    "RAY-07",
    "one Ray session on this host",
    why="a driver may join the one that was left over, where no GPU is free",
    expected="at most one raylet",
    remedy=Remedy(bare_metal="ray stop   (or kill {pids})"),
)
def sessions(context: CheckContext) -> Finding:
    """Counts the raylets and their sessions."""
    if not _is_used(context):
        return skipped(_NOT_USED)
    nodes = find_ray_nodes(context.files)
    if len(nodes) > 1:
        text = listing([f"pid {node.pid} ({node.session or node.gcs_address})" for node in nodes])
        return warned(f"{len(nodes)} raylets: {text}",
                      values={"pids": " ".join(str(node.pid) for node in nodes[:-1])})  # fmt: skip
    return passed(f"pid {nodes[0].pid}" if nodes else _NO_NODE)


CHECKS = (
    version, cluster, node_address, node_gpus, node_environ, object_store, sessions,
)  # fmt: skip
