"""Waiting for the first of several readers."""

import os
import time

import pytest

from tests.support.ipc_queues import in_thread, sleeping
from vcli.runtime.ipc.reader_set import ReaderSet, wait_any


def test_waiting_for_any_gives_those_that_have_a_record(replies):
    readers, writers = replies
    assert wait_any(readers, 0.0) == ([], [])
    writers[2].send([b"x"])
    writers[0].send([b"y"])
    assert wait_any(readers, 5.0) == ([readers[0], readers[2]], [])
    assert bytes(readers[2].recv(0.0)[0]) == b"x"
    assert wait_any(readers, 5.0) == ([readers[0]], [])


def test_a_sleeping_set_is_woken_by_any_of_its_readers(replies):
    readers, writers = replies
    ready = ReaderSet(readers)
    for number in (1, 0, 2, 2, 1):
        join = in_thread(ready.wait, 10.0)
        sleeping(join.thread)
        writers[number].send([b"x"])
        assert join() == ([readers[number]], [])
        readers[number].recv(0.0)
    assert ready.wait(0.0) == ([], [])


def test_a_set_is_woken_by_a_descriptor_a_cancel_and_a_close(replies):
    readers, writers = replies
    extra = os.eventfd(0)
    ready = ReaderSet(readers, [extra])
    for wake, expected in (
        (lambda: os.eventfd_write(extra, 1), ([], [extra])),
        (readers[1].cancel, ([readers[1]], [])),
    ):
        join = in_thread(ready.wait, 10.0)
        sleeping(join.thread)
        wake()
        assert join() == expected
        if not expected[0]:
            os.eventfd_read(extra)
    writers[2].close()
    assert ready.wait(10.0)[0] == [readers[1], readers[2]]
    os.close(extra)


def test_a_stream_of_records_does_not_hide_the_other_descriptors(replies):
    readers, writers = replies
    extra = os.eventfd(1)
    ready = ReaderSet(readers, [extra])
    writers[1].send([b"x"])
    assert ready.wait(10.0) == ([readers[1]], [extra])
    os.eventfd_read(extra)
    assert ready.wait(10.0) == ([readers[1]], [])
    ready.close()
    os.close(extra)


def test_a_set_times_out(replies):
    began = time.monotonic()
    assert wait_any(replies[0], 0.05) == ([], [])
    assert time.monotonic() - began >= 0.05


def test_a_set_and_recv_may_take_turns(replies):
    readers, writers = replies
    ready = ReaderSet(readers)
    for _ in range(50):
        writers[0].send([b"a"])
        assert ready.wait(5.0) == ([readers[0]], [])
        assert bytes(readers[0].recv(5.0)[0]) == b"a"
        join = in_thread(readers[0].recv, 5.0)
        writers[0].send([b"b"])
        assert bytes(join()[0]) == b"b"


@pytest.mark.usefixtures("no_recheck")
def test_a_record_that_comes_just_before_a_set_arms_is_seen_before_it_sleeps(monkeypatch, replies):
    readers, writers = replies
    ready = ReaderSet(readers)
    assert ready.wait(0.05) == ([], [])  # takes the rings of the start
    arm = readers[1].ring.arm
    monkeypatch.setattr(readers[1].ring, "arm", lambda: (writers[1].send([b"x"]), arm()))
    began = time.monotonic()
    assert ready.wait(10.0) == ([readers[1]], [])
    assert time.monotonic() - began < 5.0


def test_a_set_that_expects_nothing_spins_only_where_it_was_allowed_and_soon_stops(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    extra = os.eventfd(0)
    quiet, spinning = ReaderSet([], [extra]), ReaderSet([], [extra], idle_spin_us=100)
    assert not quiet._idle_spinner.is_worthwhile
    assert spinning._idle_spinner.is_worthwhile
    for _ in range(4):
        assert spinning.wait(0.0, expects_record=False) == ([], [])
    assert not spinning._idle_spinner.is_worthwhile
    os.eventfd_write(extra, 1)
    assert quiet.wait(10.0, expects_record=False) == ([], [extra])
    quiet.close()
    spinning.close()
    os.close(extra)
