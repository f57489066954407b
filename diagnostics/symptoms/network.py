"""Addresses, names, ports, and ranks that do not find each other."""

from typing import Final

from vcli.diagnostics.symptoms.progress import JOINED
from vcli.diagnostics.symptoms.symptom import Sign, Symptom

_GLOO: Final = r"(?:Gloo connectFullMesh failed|gloo/transport/tcp/\S+\] connect\b).*\["
_CLIENTS: Final = Sign(
    "seconds waiting for clients.",
    r"after (?P<seconds>\d+) seconds waiting for clients\. (?P<joined>\d+)/(?P<total>\d+) clients",
)
_CLIENT_TIMEOUT: Final = Sign(
    "The client socket has timed out after",
    r"client socket has timed out after \d+m?s while trying to connect to "
    r"\(?(?P<address>[^\s,)]+?)(?:, |:)(?P<port>\d+)\)?",
)
_CONNECT: Final = (
    r"NCCL WARN .*[Cc]onnect to (?P<address>[^\s<]+<\d+>) (?:failed|returned)\b.*"
    r"(?:No route to host|Connection timed out|Software caused connection abort)"
)
_NO_ROOM_FOR_NODE: Final = Sign(
    "No available node types can fulfill resource request",
    r"fulfill resource requests? .*'node:(?P<address>[^']+)'",
)

NETWORK: Final = (
    Symptom(
        name="gloo-loopback",
        title="gloo was told to reach another rank at 127.x",
        signs=(
            Sign("Gloo connectFullMesh failed", _GLOO + r"(?:::ffff:)?(?P<address>127\.[\d.]+)"),
            Sign("gloo/transport/tcp", _GLOO + r"(?:::ffff:)?(?P<address>127\.[\d.]+)"),
        ),
        cause="a node's own host name resolves to {address}, and gloo gave that to its peers",
        remedy="on each node: export GLOO_SOCKET_IFNAME=<interface towards the others>, or put "
        "the node's real address for its host name into /etc/hosts",
        check="HOST-04",
        reports="sglang #868",
    ),
    Symptom(
        name="gloo-container",
        title="gloo was told to reach another rank at the address of a container bridge",
        signs=(
            Sign(
                "Gloo connectFullMesh failed",
                _GLOO + r"(?:::ffff:)?(?P<address>172\.(?:1[7-9]|2\d)\.[\d.]+)",
            ),
            Sign(
                "gloo/transport/tcp",
                _GLOO + r"(?:::ffff:)?(?P<address>172\.(?:1[7-9]|2\d)\.[\d.]+)",
            ),
        ),
        cause="{address} is an address inside a container; other nodes cannot reach it",
        remedy="docker run --network=host, and GLOO_SOCKET_IFNAME=<interface of the host>",
        check="HOST-04",
        reports="sglang #836",
    ),
    Symptom(
        name="gloo-mesh",
        title="gloo could not connect all ranks",
        signs=(Sign("Gloo connectFullMesh failed"),),
        cause="at least one rank gave an address that the others cannot reach: the wrong "
        "interface, or a host name that resolves to it",
        remedy="the same on all nodes: export GLOO_SOCKET_IFNAME=<interface towards the others>",
        check="HOST-04",
        reports="sglang #868, #3226",
    ),
    Symptom(
        name="gloo-interface",
        title="gloo does not find its interface",
        signs=(Sign("Unable to find address for: ", r"find address for: (?P<interface>[\w.@-]+)"),),
        cause="GLOO_SOCKET_IFNAME names {interface}, which has no address on this node",
        remedy="ip -br addr shows the interfaces; names may differ between nodes",
        check="ENV-02",
    ),
    Symptom(
        name="nccl-interface",
        title="NCCL does not find its interface",
        signs=(Sign("no socket interface found", r"NCCL WARN.*no socket interface found"),),
        cause="NCCL_SOCKET_IFNAME names no interface of this node that is up",
        remedy="ip -br addr shows the interfaces; unset NCCL_SOCKET_IFNAME, or name one of them",
        check="ENV-02",
    ),
    Symptom(
        name="rendezvous-without-host",
        title="no node hosts the rendezvous",
        signs=(_CLIENT_TIMEOUT,),
        also=((Sign("RendezvousConnectionError: The connection to the C10d store has failed"),),),
        cause="no node takes {address} for its own address, so nobody listens on port {port}; or "
        "the way to it is blocked",
        remedy="name node 0 by its host name in --rdzv-endpoint, or use static ranks "
        "(--node-rank, --master-addr); on node 0: ip -br addr must show the address",
        check="NET-03",
        reports="pytorch #107021, #69197",
    ),
    Symptom(
        name="master-unreachable",
        title="node 0 cannot be reached",
        signs=(
            _CLIENT_TIMEOUT,
            Sign(
                "TCP client failed to connect",
                r"TCP client failed to connect(?:/validate)? to (?:host )?"
                r"(?P<address>\S+):(?P<port>\d+) - timed out",
            ),
        ),
        cause="nobody answered at {address} port {port}: node 0 is not started or listens "
        "elsewhere, the address is another node's, or a firewall drops the packets",
        remedy="start node 0 first; from the other node: nc -vz {address} {port} (refused = "
        "nobody listens, silence = a firewall or the wrong interface)",
        check="NET-03",
        reports="sglang #2561",
    ),
    Symptom(
        name="data-parallel-loopback",
        title="ranks on other nodes wait at their own 127.0.0.1",
        signs=(_CLIENTS,),
        also=(
            (Sign("tcp://127.0.0.1:"), Sign("data_parallel_master_ip", r"master_ip\W+127\.0")),
            (Sign(", ip=", r"pid=\d+, ip="), Sign("nnodes", r"nnodes\W+[2-9]")),
        ),
        cause="the master address stayed 127.0.0.1, so ranks on other nodes connect to their own "
        "node: {joined} of {total} came within {seconds} s",
        remedy="vLLM: --data-parallel-backend ray, or --data-parallel-address <node 0's address>; "
        "vcli: --master-addr <node 0's address>",
        check="NET-03",
        reports="vllm #44878, PR #45150",
    ),
    Symptom(
        name="rendezvous-alone",
        title="a rank waited alone at the rendezvous",
        signs=(
            Sign(
                "seconds waiting for clients. 1/",
                r"waiting for clients\. 1/(?P<total>[2-9]|[1-9]\d+) clients",
            ),
            Sign(
                "in store based barrier on rank",
                r"world_size=(?P<total>[2-9]|[1-9]\d+), (?:num_workers_joined|worker_count)=1\b",
            ),
        ),
        cause="the other ranks did not come to this address and port: each process chose a port "
        "of its own, or they failed before",
        remedy="give all ranks one MASTER_ADDR and one MASTER_PORT (no free port chosen by each); "
        "else look for the first error of another rank",
        check="ENV-05",
        reports="pytorch #53395",
    ),
    Symptom(
        name="rendezvous-incomplete",
        title="some ranks did not come to the rendezvous",
        signs=(_CLIENTS,),
        cause="{joined} of {total} ranks came within {seconds} s; the others failed before, were "
        "not started, or have another address or port",
        remedy="look for the first error in the log of a rank that is missing; compare "
        "MASTER_ADDR and MASTER_PORT on all nodes",
    ),
    Symptom(
        name="rank-0-late",
        title="rank 0 did not give the NCCL id in time",
        signs=(
            Sign(
                "ncclUniqueId from [",
                r"\[(?P<rank>\d+)\] is setting up NCCL communicator and retr(?:ie|ei)ving "
                r"ncclUniqueId from \[0\].*got error: "
                r"(?:Socket Timeout|Timeout waiting|wait timeout)",
            ),
        ),
        cause="rank {rank} was ready, rank 0 was not: it still loads or compiles, or it has failed",
        remedy="look at what rank 0 did last; where it is only slow, raise the timeout of "
        "init_process_group (--distributed-timeout-seconds in vLLM)",
        check="PROC-06",
        reports="pytorch #107177",
    ),
    Symptom(
        name="name-unresolvable",
        title="a host name cannot be resolved",
        signs=(
            Sign(
                "The IPv4 network addresses of (",
                r"IPv4 network addresses of \((?P<host>[^,]+), \d+\) cannot be retrieved "
                r"\(gai error: -[23]\b",
            ),
            Sign(
                "errno: 22 - Invalid argument",
                r"client socket has failed to connect to \[(?P<host>[^\]]+)\]:\d+ \(errno: 22",
            ),
            Sign("socket.gaierror: [Errno -", r"socket\.gaierror: \[Errno -[235]\]"),
        ),
        ended_by=JOINED,
        cause="a node advertised its host name, and the others have no address for it",
        remedy="torchrun --local-addr <address of the node>; or add the names of all nodes to "
        "/etc/hosts; or name addresses instead of hosts",
        check="NET-02",
        reports="pytorch #150532",
    ),
    Symptom(
        name="port-taken",
        title="the port is taken",
        signs=(
            Sign(
                "failed to listen on any local network address",
                r"local network address\..*?(?:port: |:)(?P<port>\d+)\b.*"
                r"(?:EADDRINUSE|errno: 98)",
            ),
            Sign(
                "error while attempting to bind on address",
                r"\[Errno 98\] error while attempting to bind on address \('[^']*', "
                r"(?P<port>\d+)",
            ),
            Sign("Address already in use", r"OSError: \[Errno 98\] Address already in use"),
            Sign("Address already in use", r"zmq\.error\.ZMQError: Address already in use"),
        ),
        cause="another process listens on this port: another job, or one that was left over",
        remedy="ss -ltnp 'sport = :{port}' names it; stop it, or choose another port "
        "(--master-port, --port)",
        check="NET-04",
        reports="vllm #39015",
    ),
    Symptom(
        name="nccl-connect-blocked",
        title="NCCL's own connections are blocked",
        signs=(Sign("Connect to ", _CONNECT), Sign("connect to ", _CONNECT)),
        cause="the ranks met, but NCCL connects to random ports, and {address} is not let through",
        remedy="open all ports between the nodes, or shrink net.ipv4.ip_local_port_range on all "
        "nodes and open that range; NCCL_SOCKET_IFNAME where the interface is the wrong one",
        reports="nccl #388, sglang #3820",
    ),
    Symptom(
        name="ray-address-family",
        title="Ray knows the node by an IPv6 address, the engine asks for an IPv4 one",
        signs=(
            Sign(
                "No available node types can fulfill resource request",
                r"'node:(?P<address>\d+\.\d+\.\d+\.\d+)'",
            ),
            Sign("Waiting for creating a placement group", r"'node:(?P<address>\d+\.\d+\.[\d.]+)'"),
        ),
        also=(
            (
                Sign("Ray cluster at address: [", r"at address: \[[0-9a-fA-F:]+\]"),
                Sign("Local node IP: ", r"Local node IP: [0-9a-fA-F]*:[0-9a-fA-F:]+"),
            ),
        ),
        ended_by=JOINED,
        cause="Ray registered an IPv6 address, so no node has the resource node:{address}",
        remedy="one family for both: VLLM_HOST_IP=<the address that ray status shows> on each node",
        check="NET-05",
        reports="vllm #13521",
    ),
    Symptom(
        name="ray-node-address",
        title="the engine asks Ray for a node address that Ray does not know",
        signs=(_NO_ROOM_FOR_NODE,),
        cause="the engine took {address} for this node's address, Ray registered another one",
        remedy="ray start --node-ip-address {address} on that node, or VLLM_HOST_IP=<the address "
        "that ray status shows>",
        check="NET-01",
        reports="vllm #7815",
    ),
)
