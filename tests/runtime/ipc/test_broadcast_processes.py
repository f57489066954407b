"""The queue between processes: order under load, death, stops, CPU, and what is left."""

import contextlib
import hashlib
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.ipc.queue_child import random_arrays
from tests.support.ipc_queues import in_thread, sleeping
from tests.support.processes import opened_files
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.codec import decode, encode
from vcli.runtime.ipc.errors import PeerClosedError, PeerDiedError, QueueFullTimeout
from vcli.runtime.ipc.reader_set import wait_any

pytestmark = pytest.mark.process


@pytest.fixture
def queue():
    made = []

    def make(num_readers, capacity_bytes=1 << 16):
        writer = BroadcastWriter.create(num_readers, capacity_bytes, "steps")
        made.append(writer)
        return writer

    yield make
    for writer in made:
        writer.close()


def start_readers(start_child, writer, role, count=0):
    children = [
        start_child(role, read=writer.reader_handle(i), count=count)
        for i in range(writer.num_readers)
    ]
    for index, child in enumerate(children):
        writer.set_reader_pid(index, child.pid)
    return children


def send_all(writer, messages):
    for message in messages:
        writer.send(message, 1.0)


def kill(child):
    child.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(("num_readers", "count"), [(1, 3000), (2, 2000), (8, 800)])
def test_no_record_is_torn_lost_or_out_of_order(queue, start_child, num_readers, count):
    writer = queue(num_readers)
    children = start_readers(start_child, writer, "check_sequence", count)
    rng = random.Random(7)
    for number in range(count):
        # Mostly small; some above half of the 64 KiB ring, which go in parts.
        size = rng.randrange(300) if rng.random() < 0.97 else rng.randrange(150_000)
        payload = rng.randbytes(size)
        writer.send(encode((number, payload, hashlib.md5(payload).digest())), 30.0)
    assert [child.wait(30) for child in children] == [0] * num_readers


def test_ten_thousand_arrays_of_all_sizes_arrive_complete_and_in_order_at_three_readers(
    queue, start_child
):
    writer = queue(3, 1 << 20)
    children = start_readers(start_child, writer, "check_arrays", 10_000)
    num_bytes = 0
    for number, array in random_arrays(10_000):
        writer.send(encode((number, array)), 30.0)
        num_bytes += array.nbytes
    assert num_bytes > 400_000_000
    assert [child.stdout.readline() for child in children] == [f"{num_bytes}\n"] * 3
    assert [child.wait(30) for child in children] == [0, 0, 0]


def test_replies_come_back_through_a_queue_of_their_own(queue, start_child):
    writer = queue(1)
    replies, handle = BroadcastReader.create(1 << 16, "replies")
    child = start_child("echo", read=writer.reader_handle(0), write=handle)
    replies.set_writer_pid(child.pid)
    for number in range(200):
        writer.send([b"head", bytes([number]) * number], 10.0)
        assert [bytes(part) for part in replies.recv(10.0)] == [b"head", bytes([number]) * number]
    replies.close()


@pytest.mark.usefixtures("no_recheck")
def test_a_blocked_writer_is_woken_by_a_killed_reader_and_names_it_and_its_signal(
    queue, start_child
):
    writer = queue(2)
    _, second = start_readers(start_child, writer, "hold")
    writer.send([b"x"], 20.0)
    assert second.stdout.readline() == "holding\n"
    send = in_thread(writer.send, [b"y" * 1_000_000], 60.0)
    sleeping(send.thread)
    kill(second)
    with pytest.raises(PeerDiedError) as caught:
        send()
    error = caught.value
    assert (error.reader_index, error.pid, error.exit_code) == (1, second.pid, -signal.SIGKILL)
    assert f"process {second.pid} was killed by SIGKILL" in str(error)
    assert "in execute_model for" in str(error)


@pytest.mark.parametrize(
    ("role", "exit_code", "words"),
    [("leave", 7, "exited with status 7"), ("hold", -signal.SIGKILL, "was killed by SIGKILL")],
)
def test_a_dead_reader_s_status_is_told_to_its_parent_which_can_reap_it_still(
    queue, start_child, role, exit_code, words
):
    writer = queue(1)
    (child,) = start_readers(start_child, writer, role)
    writer.send([b"x"], 20.0)
    assert child.stdout.readline() == "holding\n"
    if role == "hold":
        kill(child)
    with pytest.raises(PeerDiedError, match=words) as caught:
        send_all(writer, itertools.repeat([b"x"]))
    assert caught.value.exit_code == exit_code
    assert child.wait(20) == exit_code


def test_a_killed_reader_is_named_although_there_is_space(queue, start_child):
    writer = queue(2)
    first, _ = start_readers(start_child, writer, "hold")
    kill(first)
    with pytest.raises(PeerDiedError) as caught:
        send_all(writer, itertools.repeat([b"x"]))
    assert (caught.value.reader_index, caught.value.pid) == (0, first.pid)


def test_a_reader_that_died_before_it_attached_is_named(queue, start_child):
    writer = queue(1)
    (child,) = start_readers(start_child, writer, "hold")
    kill(child)
    child.wait()
    with pytest.raises(PeerDiedError, match="never attached"):
        writer.send([b"x" * 1_000_000], 10.0)


@pytest.mark.usefixtures("no_recheck")
def test_a_killed_writer_is_named_after_everything_it_sent_was_read(start_child):
    replies, handle = BroadcastReader.create(1 << 16, "replies")
    child = start_child("send_then_wait", write=handle, count=100)
    replies.set_writer_pid(child.pid)
    assert child.stdout.readline() == "sent\n"
    kill(child)
    assert [decode(replies.recv(5.0)) for _ in range(100)] == [(n,) for n in range(100)]
    with pytest.raises(PeerDiedError) as caught:
        replies.recv(60.0)
    error = caught.value
    assert (error.reader_index, error.pid, error.exit_code) == (None, child.pid, -signal.SIGKILL)
    assert f"its writer (pid {child.pid}) was killed by SIGKILL" in str(error)
    assert wait_any([replies], 5.0) == ([replies], [])
    replies.close()


def test_a_writer_that_left_in_order_is_no_death(start_child):
    replies, handle = BroadcastReader.create(1 << 16, "replies")
    child = start_child("send_and_leave", write=handle, count=3)
    replies.set_writer_pid(child.pid)
    assert [decode(replies.recv(20.0)) for _ in range(3)] == [(0,), (1,), (2,)]
    child.wait(20)
    with pytest.raises(PeerClosedError):
        replies.recv(5.0)
    replies.close()


def test_sleeping_readers_are_woken_by_a_killed_writer_and_name_it_and_its_signal():
    script = (
        "import sys, time, msgspec, subprocess\n"
        "from vcli.runtime.ipc.broadcast import BroadcastWriter\n"
        "writer = BroadcastWriter.create(2, 1 << 16, 'steps')\n"
        "children = []\n"
        "for i in range(2):\n"
        "    h = writer.reader_handle(i)\n"
        "    arg = msgspec.json.encode({'read': h, 'write': None}).decode()\n"
        "    command = [sys.executable, sys.argv[1], 'sleep_in_recv', arg, '0']\n"
        "    children.append(subprocess.Popen(command, pass_fds=h.fds()))\n"
        "time.sleep(60)\n"
    )
    child_script = str(Path(__file__).with_name("queue_child.py"))
    with subprocess.Popen(
        [sys.executable, "-c", script, child_script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
        kill(parent)
        # Reaped: from now on the kernel tells anybody how it ended, if it is Linux 6.15.
        pid, end = parent.pid, parent.wait(20)
        ends = [parent.stdout.readline() for _ in range(2)]
    for said in ends:
        assert said.startswith(f"PeerDiedError: queue 'steps': its writer (pid {pid})")
        assert said.endswith(("was killed by SIGKILL\n", "died\n"))
    assert end == -signal.SIGKILL


def test_a_stopped_reader_loses_nothing_and_is_named(queue, start_child):
    writer = queue(2)
    children = start_readers(start_child, writer, "check_sequence", 400)
    digest = hashlib.md5(b"x" * 900).digest()
    messages = iter([encode((number, b"x" * 900, digest)) for number in range(400)])
    writer.send(next(messages), 20.0)
    assert [child.stdout.readline() for child in children] == ["started\n"] * 2
    children[1].send_signal(signal.SIGSTOP)
    with pytest.raises(QueueFullTimeout) as caught:
        send_all(writer, messages)
    assert [state.reader_index for state in caught.value.behind] == [1]
    assert caught.value.behind[0].pid == children[1].pid
    children[1].send_signal(signal.SIGCONT)
    number = 400 - sum(1 for _ in messages) - 1  # the one that found no space
    for later in range(number, 400):
        writer.send(encode((later, b"x" * 900, digest)), 20.0)
    assert [child.wait(20) for child in children] == [0, 0]


@pytest.mark.slow
def test_a_reader_stopped_for_ten_seconds_loses_nothing(queue, start_child):
    writer = queue(2)
    children = start_readers(start_child, writer, "check_sequence", 400)
    digest = hashlib.md5(b"x" * 900).digest()
    writer.send(encode((0, b"x" * 900, digest)), 20.0)
    assert [child.stdout.readline() for child in children] == ["started\n"] * 2
    children[1].send_signal(signal.SIGSTOP)
    waker = f"import os,time; time.sleep(10); os.kill({children[1].pid}, {int(signal.SIGCONT)})"
    with subprocess.Popen([sys.executable, "-c", waker]):
        for number in range(1, 400):
            writer.send(encode((number, b"x" * 900, digest)), 20.0)
        assert [child.wait(20) for child in children] == [0, 0]


def test_a_blocked_writer_uses_no_cpu(queue, start_child):
    writer = queue(1)
    (child,) = start_readers(start_child, writer, "hold")
    writer.send([b"x"], 20.0)
    assert child.stdout.readline() == "holding\n"
    before = time.process_time()
    with pytest.raises(QueueFullTimeout):
        writer.send([b"y" * 1_000_000], 1.0)
    assert time.process_time() - before < 0.05


def test_an_idle_reader_uses_no_cpu(queue, start_child):
    writer = queue(1)
    (child,) = start_readers(start_child, writer, "cpu_time", 1)
    writer.send([b"first"], 20.0)
    assert not select.select([child.stdout], [], [], 2.0)[0]
    writer.send([b"last"], 20.0)
    assert float(child.stdout.readline()) < 0.02


def test_a_reader_that_is_paced_does_not_spin(queue, start_child):
    writer = queue(1)
    (child,) = start_readers(start_child, writer, "cpu_time", 50)
    began = time.monotonic()
    for number in range(51):
        writer.send([b"step"], 20.0)
        time.sleep(max(0.0, began + 0.02 * (number + 1) - time.monotonic()))
    assert float(child.stdout.readline()) < 0.05  # of a second: 5 % of a core


def test_no_child_inherits_more_than_its_handle(queue, start_child):
    writer = queue(2)
    child = start_child("hold", read=writer.reader_handle(0))
    writer.send([b"x"], 20.0)
    assert child.stdout.readline() == "holding\n"
    links = opened_files(child.pid)
    # mmap keeps one duplicate of the segment's descriptor; its own cancel bell is the third.
    assert sum("memfd:vcli-steps" in link for link in links) == 2
    assert sum("eventfd" in link for link in links) == 3


def test_killing_everyone_leaves_no_file_and_no_memory():
    script = (
        "import os, sys, time\n"
        "from vcli.runtime.ipc.broadcast import BroadcastWriter\n"
        "writer = BroadcastWriter.create(1, 1 << 20, sys.argv[1])\n"
        "os.fork()\n"
        "os.write(1, b'%d\\n' % os.getpid())\n"
        "time.sleep(60)\n"
    )
    name = f"left-{os.getpid()}"
    command = [sys.executable, "-c", script, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        held_before = holders(name)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        parent.stdout.read()  # ends when both are gone
    assert held_before == set(pids)
    assert holders(name) == set()
    assert not [path for path in Path("/dev/shm").iterdir() if name in path.name]


def holders(name):
    """Processes that hold a queue's memory; without one the kernel has freed it."""
    pids = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"memfd:vcli-{name}" in maps.read_text():
                pids.add(int(maps.parent.name))
    return pids
