"""One executor over two nodes: the second node's launcher is played by the test, on this host."""

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.fake_worker import (
    FAKE_WORKER,
    SPEC,
    STEP_RAISES_ON_RANK_1,
    fake_config,
    fake_step,
    rank_of,
)
from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import (
    FailureReport,
    RpcTimeoutError,
    StartupError,
    WorkerDiedError,
    WorkerError,
)
from vcli.runtime.executor.base import RankReply
from vcli.runtime.executor.multinode import MultiNodeExecutor
from vcli.runtime.executor.node_messages import (
    FrameKind,
    NodeActivity,
    NodeFailed,
    NodeHello,
    NodeLinks,
    NodeReady,
    NodeSaid,
)
from vcli.runtime.executor.node_workers import NodeWorkers
from vcli.runtime.ipc.curve import JobKey, job_key
from vcli.runtime.launch.core_link import CoreLink
from vcli.runtime.messages import ChildState, KVCacheConfig
from vcli.runtime.worker.dispatch import StoreAddress
from vcli.topology.config import ParallelConfig
from vcli.topology.errors import ConfigError
from vcli.topology.planner import plan_topology

pytestmark = pytest.mark.process

TOKEN = "0123456789abcdef"


def config_of(node_rank: int, **overrides: Any) -> Any:
    parallel = ParallelConfig(
        tensor_parallel_size=4, nnodes=2, node_rank=node_rank, master_addr="127.0.0.1"
    )
    plan = plan_topology(parallel, model=SPEC, dtype="float32")
    return fake_config(parallel=parallel, plan=plan, **overrides)


class SecondNode:
    """Ranks 2 and 3: what the launcher of node 1 does, without signals and screens."""

    def __init__(
        self, config: EngineConfig, port: int, key: JobKey, session: str, worker_cls: str
    ) -> None:
        self.answers = True
        self.stopped: list[FailureReport | None] = []
        self.was_stopped = threading.Event()
        self.workers = NodeWorkers(
            config,
            is_trusted=key.is_secret,
            send=self._send,
            on_message=lambda message: self.link.say(NodeSaid(message=message)),
            on_failure=lambda report: self.link.say(NodeFailed(report=report)),
            worker_cls=worker_cls,
        )
        self.link = CoreLink(
            ("127.0.0.1", port),
            key,
            NodeHello(session=session, node_rank=1, pid=os.getpid()),
            on_call=self.workers.call,
            on_ask=self._on_ask,
            on_stop=self._on_stop,
            on_gone=lambda reason: self.was_stopped.set(),
        )

    def start(self) -> None:
        store = StoreAddress(host="127.0.0.1", port=1)
        self.workers.start(store, environ={"FROM_NODE": "1"}, starter=None)
        methods = self.workers.wait_ready()
        self.link.say(NodeReady(methods=methods, pids=self.workers.pids))

    def close(self) -> None:
        self.workers.shutdown(is_asked=False)
        self.link.close()

    def _send(self, frames: Sequence[bytes]) -> None:
        self.link.send(frames)

    def _on_ask(self, number: int) -> None:
        if self.answers:
            self.workers.answer(number)

    def _on_stop(self, report: FailureReport | None) -> None:
        self.stopped.append(report)
        self.was_stopped.set()


class Pair:
    """The executor of node 0, and node 1."""

    def __init__(
        self, token: str | None, *, worker_cls: str = FAKE_WORKER, **overrides: Any
    ) -> None:
        self.states: list[ChildState] = []
        key, session = job_key(token), secrets.token_hex(8)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.executor = MultiNodeExecutor(
            config_of(0, **overrides), on_message=self._take, worker_cls=worker_cls
        )
        self.executor.use_nodes(
            NodeLinks(
                listen_fd=listener.detach(),
                store=StoreAddress(host="127.0.0.1", port=1),
                key=key,
                session=session,
                hosts=("here", "there"),
                interface="lo",
            )
        )
        self.key = key
        self.node = SecondNode(config_of(1, **overrides), self.port, key, session, worker_cls)

    def _take(self, message: object) -> None:
        if isinstance(message, ChildState):
            self.states.append(message)

    def start(self) -> None:
        starting = threading.Thread(target=self.node.start)
        starting.start()
        self.executor.start()
        starting.join(20)

    def close(self) -> None:
        self.executor.shutdown()
        self.node.close()


@pytest.fixture(params=[TOKEN, None], ids=["token", "no-token"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def trusted() -> Iterator[Pair]:
    made = Pair(TOKEN)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_a_call_reaches_all_ranks_of_both_nodes_and_replies_are_in_order(pair: Pair) -> None:
    executor = pair.executor
    assert executor.collective_rpc("echo", args=["x"], kwargs={"times": 2}) == ["xx"] * 4
    assert executor.determine_available_memory() == [1000, 1001, 1002, 1003]
    executor.initialize_from_config(KVCacheConfig(num_blocks=9, block_size=16))
    assert executor.collective_rpc("determine_available_memory", unique_reply_rank=3) == 1003
    (report,) = executor.group_reports()
    assert report.ranks == [0, 1, 2, 3]
    for step in range(1, 50):
        result = executor.execute_model(fake_step(step, number=step))
        assert result is not None
        assert (result.step, result.token_ids) == (step, [step + 1])
    assert sorted(executor.worker_pids) == [f"Worker_TP{rank}" for rank in range(4)]
    # States of the other node's ranks are seen here.
    assert {state.rank for state in pair.states if state.state == "kv"} == {0, 1, 2, 3}
    assert executor.collective_rpc("environment", args=["FROM_NODE"]) == [None, None, "1", "1"]
    assert executor.collective_rpc("environment", args=["GLOO_SOCKET_IFNAME"])[:2] == ["lo", "lo"]


def test_a_large_argument_and_reply_cross_nodes(pair: Pair) -> None:
    block = os.urandom(5 << 20)
    assert pair.executor.collective_rpc("echo", args=[block]) == [block] * 4


def test_functions_cross_nodes_with_a_token_only(pair: Pair) -> None:
    if pair.key.is_secret:
        assert pair.executor.collective_rpc(rank_of, args=[10]) == [10, 11, 12, 13]
        return
    with pytest.raises(ConfigError, match="without a job token"):
        pair.executor.collective_rpc(rank_of, args=[10])
    # Nobody has got half of it: the next call is answered by all.
    assert pair.executor.collective_rpc("echo", args=[1]) == [1] * 4


def test_a_value_that_needs_a_pickle_is_refused_without_a_token(pair: Pair) -> None:
    if pair.key.is_secret:
        assert pair.executor.collective_rpc("echo", args=[[{1, 2}]]) == [[{1, 2}]] * 4
        return
    with pytest.raises(Exception, match="does not cross nodes without a job token"):
        pair.executor.collective_rpc("echo", args=[[{1, 2}]])
    assert pair.executor.collective_rpc("echo", args=[1]) == [1] * 4


def test_what_a_remote_rank_raises_is_told_with_its_traceback(pair: Pair) -> None:
    with pytest.raises(WorkerError, match="ordered on rank 3") as raised:
        pair.executor.collective_rpc("raise_on", args=[[3]])
    assert raised.value.report.rank == 3
    assert "raise ValueError" in raised.value.report.traceback
    assert pair.executor.collective_rpc("echo", args=[1]) == [1] * 4


def test_an_aggregator_gets_what_failed_ranks_of_both_nodes_hand_on(pair: Pair) -> None:
    def values(replies: list[RankReply]) -> list[object]:
        return [(reply.value, reply.failure and reply.failure.rank) for reply in replies]

    hand_on = pair.executor.collective_rpc
    assert hand_on("fail_and_hand_on", args=[[1, 2]], aggregate=values) == [
        ("done on rank 0", None),
        ({"saved": 1}, 1),
        ({"saved": 2}, 2),
        ("done on rank 3", None),
    ]
    with pytest.raises(WorkerError, match="failed on rank 2"):
        hand_on("fail_and_hand_on", args=[[2]])
    with pytest.raises(WorkerError, match="ordered on rank 3"):
        hand_on("raise_on", args=[[3]], aggregate=values)
    assert hand_on("echo", args=[1]) == [1] * 4


def test_a_late_remote_rank_is_named_with_what_it_does(trusted: Pair) -> None:
    waiting = trusted.executor.collective_rpc(
        "sleep_on", args=[[3], 2.0], timeout_s=1.5, non_block=True
    )
    deadline = time.monotonic() + 5
    while not (doing := trusted.node.workers.activity()).get(3):
        assert time.monotonic() < deadline
    trusted.node.link.say(NodeActivity(by_rank=doing))
    with pytest.raises(RpcTimeoutError, match=r"rank 3 \(Worker_TP3, in sleep_on for"):
        waiting.result(10)


def test_a_step_that_fails_here_stops_the_other_node_with_the_cause(trusted: Pair) -> None:
    with pytest.raises(WorkerError, match="rank 1"):
        trusted.executor.execute_model(fake_step(1, STEP_RAISES_ON_RANK_1))
    trusted.executor.shutdown()
    assert trusted.node.was_stopped.wait(5)
    (report,) = trusted.node.stopped
    assert report is not None
    assert "device-side assert on rank 1" in report.message


def test_a_remote_worker_that_is_killed_fails_every_call_with_its_name(trusted: Pair) -> None:
    pid = trusted.executor.worker_pids["Worker_TP2"]
    call = trusted.executor.collective_rpc("sleep_on", args=[[2], 30], non_block=True)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=rf"Worker_TP2 \(rank 2\) pid {pid}.*SIGKILL"):
        call.result(5)
    assert trusted.executor.is_failed


def test_a_node_that_is_gone_fails_every_call_with_its_name(trusted: Pair) -> None:
    call = trusted.executor.collective_rpc("sleep_on", args=[[0], 30], non_block=True)
    begun = time.monotonic()
    trusted.node.link.close()
    with pytest.raises(WorkerDiedError, match=r"node1 .*on there.*its connection was closed"):
        call.result(5)
    assert time.monotonic() - begun < 2


def test_an_end_in_order_is_no_failure(trusted: Pair) -> None:
    failures: list[FailureReport] = []
    trusted.executor.register_failure_callback(failures.append)
    trusted.executor.shutdown()
    assert trusted.node.was_stopped.wait(5)
    assert trusted.node.stopped == [None]
    assert failures == []


def test_a_node_that_fails_to_load_is_the_cause_of_the_failed_start() -> None:
    pair = Pair(TOKEN)
    report = FailureReport(
        process="Worker_TP3", phase="weights", kind="ValueError", message="no such tensor",
        rank=3, host="there",
    )  # fmt: skip
    try:
        pair.node.link.say(NodeFailed(report=report))
        with pytest.raises(StartupError, match=r"Worker_TP3 .*on there.*no such tensor"):
            pair.executor.start()
    finally:
        pair.close()


def test_who_is_not_of_the_job_can_neither_join_nor_reply(trusted: Pair) -> None:
    stranger = CoreLink(
        ("127.0.0.1", trusted.port),
        trusted.key,
        NodeHello(session="guessed", node_rank=1, pid=1),
        on_call=pytest.fail,
        on_ask=pytest.fail,
        on_stop=pytest.fail,
        on_gone=lambda reason: None,
    )
    said = ChildState(process="x", state="kv", seconds=0, pid=1, rank=2)
    stranger.say(NodeSaid(message=said))
    stranger.send([FrameKind.REPLY.value, (2).to_bytes(4, "little"), b"\x92\x01\xc0", b"\x80."])
    assert trusted.executor.collective_rpc("echo", args=[1]) == [1] * 4
    stranger.close()
    assert trusted.executor.collective_rpc("echo", args=[1]) == [1] * 4
    assert not trusted.executor.is_failed
    assert "x" not in {state.process for state in trusted.states}


def test_a_reply_for_a_rank_of_another_node_is_a_failure(trusted: Pair) -> None:
    frames = [FrameKind.REPLY.value, (0).to_bytes(4, "little"), b"\x92\x01\xc0"]
    call = trusted.executor.collective_rpc("sleep_on", args=[[0], 5], non_block=True)
    trusted.node.link.send(frames)
    with pytest.raises(WorkerDiedError, match="rank 0 is not on node 1"):
        call.result(5)
