"""Bells, dead peers, cancelling; and when to spin."""

import os
import subprocess
import sys
import threading

import pytest

from tests.support.ipc_queues import Queue
from vcli.runtime.ipc import wakeup as wakeup_module
from vcli.runtime.ipc.wakeup import Spinner, Wake, WakeupReceiver
from vcli.topology.spin import SHORT_SPIN_US


@pytest.fixture
def bell():
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    receiver = WakeupReceiver(fd)
    yield receiver
    receiver.close()
    os.close(fd)


def ring(receiver):
    os.eventfd_write(receiver.doorbell_fd, 1)


def test_nothing_is_a_timeout(bell):
    assert bell.wait(0.0) is Wake.TIMEOUT


def test_a_ring_ends_one_wait(bell):
    ring(bell)
    ring(bell)
    assert bell.wait(5.0) is Wake.RUNG
    assert bell.wait(0.0) is Wake.TIMEOUT
    ring(bell)
    assert bell.wait(5.0) is Wake.RUNG


def test_a_ring_during_the_wait_ends_it(bell):
    ringer = threading.Timer(0.02, ring, [bell])
    ringer.start()
    assert bell.wait(10.0) is Wake.RUNG
    ringer.join()


def test_cancel_ends_this_wait_and_all_later_ones(bell):
    canceller = threading.Timer(0.02, bell.cancel)
    canceller.start()
    assert bell.wait(10.0) is Wake.CANCELLED
    assert bell.wait(10.0) is Wake.CANCELLED
    ring(bell)
    assert bell.wait(10.0) is Wake.CANCELLED
    canceller.join()


def test_cancel_after_close_is_harmless(bell):
    bell.close()
    bell.cancel()
    bell.close()


@pytest.mark.process
def test_a_dead_peer_ends_the_wait_after_the_rings_it_left(bell):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    bell.watch(7, child.pid)
    assert bell.wait(0.0) is Wake.TIMEOUT
    ring(bell)
    child.kill()
    assert bell.wait(5.0) is Wake.RUNG
    assert bell.wait(5.0) is Wake.PEER_GONE
    assert bell.gone == {7}
    assert bell.wait(5.0) is Wake.PEER_GONE
    assert bell.find_gone() == {7}
    child.communicate()


@pytest.mark.process
def test_a_pid_that_is_gone_already_is_a_dead_peer(bell):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    bell.watch(1, child.pid)
    assert bell.wait(5.0) is Wake.PEER_GONE


@pytest.mark.process
def test_watching_another_process_for_a_peer_forgets_the_first(bell, count_fds):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    bell.watch(1, child.pid)
    before = count_fds()
    bell.watch(1, os.getpid())
    bell.watch(1, os.getpid())
    assert count_fds() == before
    child.kill()
    child.communicate()
    assert bell.wait(0.0) is Wake.TIMEOUT


def test_nobody_spins_when_processes_outnumber_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert Spinner(2).is_worthwhile
    assert not Spinner(3).is_worthwhile


def test_of_many_readers_only_those_spin_that_have_a_cpu_beside_the_writer(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with Queue(4, num_processes=2) as (_, *readers):
        assert [r._spinner.is_worthwhile for r in readers] == [True, True, False, False]


def test_a_few_spins_in_vain_end_spinning(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    spinner = Spinner(2)
    for _ in range(4):
        assert spinner.is_worthwhile
        assert not spinner.spin(lambda: False)
    assert not spinner.is_worthwhile


def test_a_spin_in_vain_lasts_microseconds(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    now = [0]
    monkeypatch.setattr(
        wakeup_module.time, "monotonic_ns", lambda: now.__setitem__(0, now[0] + 1000) or now[0]
    )
    Spinner(2).spin(lambda: False)
    assert now[0] <= SHORT_SPIN_US * 1000 + 2000


def test_short_sleeps_bring_spinning_back_and_long_ones_do_not(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    now = [0]
    monkeypatch.setattr(wakeup_module.time, "monotonic_ns", lambda: now[0])
    spinner = Spinner(2)
    spinner._score = 0
    for slept_ns, expected in ((20_000_000, False), (50_000, True)):
        spinner.sleep_begins()
        now[0] += slept_ns
        spinner.sleep_ends()
        assert spinner.is_worthwhile is expected


def test_close_gives_every_descriptor_back(count_fds):
    fd = os.eventfd(0)
    before = count_fds()
    receiver = WakeupReceiver(fd)
    receiver.watch(0, os.getpid())
    receiver.close()
    assert count_fds() == before
    os.close(fd)
