"""Ray: addresses, resources, versions, nodes that are declared dead."""

from typing import Final

from vcli.diagnostics.symptoms.progress import JOINED
from vcli.diagnostics.symptoms.symptom import Sign, Symptom

RAY: Final = (
    Symptom(
        name="ray-placement-waits",
        title="Ray cannot place the ranks",
        signs=(
            Sign(
                "Waiting for creating a placement group of specs for",
                r"specs for (?P<seconds>[6-9]\d|\d{3,}) seconds",
            ),
            Sign("Cannot provide a placement group of placement_group_specs="),
        ),
        ended_by=JOINED,
        cause="no set of nodes has what was asked for: too few free GPUs, or a node address "
        "(node:... in specs) that Ray does not know",
        remedy="ray status shows GPUs in use and free; ray list nodes the addresses: they must be "
        "those in specs (VLLM_HOST_IP, ray start --node-ip-address)",
        check="NET-01",
        reports="vllm #13388",
    ),
    Symptom(
        name="ray-too-few-gpus",
        title="the placement group has fewer GPUs than ranks",
        signs=(
            Sign(
                "number of required GPUs exceeds the total number of available GPUs in the "
                "placement group"
            ),
        ),
        cause="Ray counts fewer GPUs than the sizes need: a node did not join, joined by another "
        "address, or Ray was started once per task instead of once per node",
        remedy="ray list nodes: one line per node, one address family, all GPUs; under Slurm start "
        "Ray with srun --ntasks-per-node=1",
        check="NET-01",
        reports="vllm #26028",
    ),
    Symptom(
        name="ray-gang-split",
        title="the engine and its worker are on different nodes",
        signs=(
            Sign(
                "Every node should have a unique IP address.",
                r"Got 1 nodes? with node ids .* and (?P<addresses>[2-9]\d*) unique IP",
            ),
        ),
        cause="Ray placed the worker of a data-parallel rank on another node than its engine",
        remedy="upgrade Ray (Serve's gang scheduling was mended), or start one engine per node "
        "(--data-parallel-size-local)",
        reports="ray #63917",
    ),
    Symptom(
        name="ray-two-addresses",
        title="a node is known by two addresses",
        signs=(
            Sign(
                "Every node should have a unique IP address.",
                r"Got (?P<nodes>\d+) nodes.* and (?P<addresses>\d+) unique IP",
            ),
        ),
        cause="{nodes} nodes use {addresses} addresses: Ray's, and that of the default route",
        remedy="on each node VLLM_HOST_IP=<the address given to ray start --node-ip-address>, set "
        "before ray start so that the workers have it too",
        check="NET-01",
        reports="vllm PR #43095",
    ),
    Symptom(
        name="ray-versions",
        title="Ray or Python differ between the nodes",
        signs=(Sign("Version mismatch: The cluster was started with"),),
        cause="Ray takes only nodes with its own version of Ray and of Python, to the patch level",
        remedy="use one container image on all nodes, or the same python and "
        "pip install ray==<version of the head node>",
        reports="ray #44063, #50511",
    ),
    Symptom(
        name="ray-node-dead",
        title="Ray declared a node dead",
        signs=(
            Sign("has been marked dead because the detector has missed too many heartbeats"),
            Sign("has mistakenly been marked as dead by the GCS"),
            Sign("health check failed due to missing too many heartbeats"),
        ),
        cause="the head node did not hear from it: its ports are not reachable from the head "
        "(a container without the host's network), or it was out of memory or CPU",
        remedy="docker run --network=host for Ray; open Ray's ports both ways; look at "
        "/tmp/ray/session_latest/logs/raylet.out on that node",
        reports="ray #46548",
    ),
    Symptom(
        name="ray-object-store",
        title="Ray's object store does not fit /dev/shm",
        signs=(
            Sign("The configured object store size", r"ValueError: .*exceeds.*/dev/shm"),
            Sign("exceeds the capacity of /dev/shm"),
        ),
        cause="/dev/shm of the container is smaller than the object store",
        remedy="docker run --shm-size=10.24gb; Kubernetes: an emptyDir with medium: Memory at "
        "/dev/shm; or ray start --object-store-memory <bytes that fit>",
        check="RAY-06",
        reports="ray #14535, #14616",
    ),
    Symptom(
        name="ray-memory",
        title="Ray killed a worker because the node ran out of memory",
        signs=(
            Sign("Task was killed due to the node running low on memory"),
            Sign("worker(s) were killed due to memory pressure", r"[1-9]\d* [Ww]orker"),
        ),
        cause="the node's memory was nearly full, and Ray's monitor killed the largest worker",
        remedy="load with fewer workers at once, or raise the memory limit of the container",
        check="HOST-05",
    ),
    Symptom(
        name="ray-driver-without-gpu",
        title="the engine runs on a node without GPUs",
        signs=(
            Sign("Ray does not allocate any GPUs on the driver node"),
            Sign("Current node has no GPU available", r"no GPU available\. current_node_resource"),
        ),
        cause="the command was started on a node whose GPUs Ray does not know or has given away",
        remedy="start it on a GPU node of the cluster; ray status must show its GPUs as free",
        check="GPU-01",
    ),
)
