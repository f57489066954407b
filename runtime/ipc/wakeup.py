"""Sleeping until the other end rings, dies, or someone cancels; spinning first where it pays.

A ring of the bell is a write to an eventfd. The sleeper waits for it in one epoll with the pidfds
of its peers, so a dead peer is seen within a millisecond, and with a cancel eventfd of its own. The
bell is edge-triggered: each ring ends one wait of each epoll that watches it, and nobody reads the
eventfd, which saves a system call per message and lets several epolls watch one bell.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from enum import IntEnum

from vcli.runtime.exit_status import exit_code_of
from vcli.runtime.ipc.cpus import usable_cpus
from vcli.topology.spin import SHORT_SPIN_US

RECHECK_S = 60.0
"""Longest sleep at a time. No ring is lost by the protocol; this bounds the harm if one were."""
_MAX_SCORE = 8


def sleep_slice_s(deadline: float | None) -> float:
    """How long to sleep now, with a deadline of the monotonic clock."""
    if deadline is None:
        return RECHECK_S
    return max(0.0, min(RECHECK_S, deadline - time.monotonic()))


class Wake(IntEnum):
    """Why a sleep ended; of several reasons the highest counts.

    A ring counts more than a death: what a peer sent before it died is not lost.
    """

    TIMEOUT = 0
    PEER_GONE = 1
    RUNG = 2
    CANCELLED = 3


class WakeupReceiver:
    """The sleeper's side of an eventfd. Owns its pidfds and the cancel eventfd, not `doorbell_fd`.

    One thread waits; `cancel()` may come from any.
    """

    def __init__(self, doorbell_fd: int) -> None:
        self.doorbell_fd = doorbell_fd
        self.gone: set[int] = set()
        """Peers that were seen dead, by index."""
        self.version = 0
        """Changes when `events()` does."""
        self._cancel_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._cancel_lock = threading.RLock()
        self.is_cancelled = False
        self._is_closed = False
        self._pids: dict[int, int] = {}
        self._peers: dict[int, int] = {}
        self._epoll = select.epoll()
        self._peer_poll = select.poll()
        for fd, events in self.events().items():
            self._epoll.register(fd, events)

    def watch(self, peer: int, pid: int) -> None:
        """Notice the death of process `pid`, known as `peer` here. Replaces an earlier pid."""
        if self._pids.get(peer) == pid:
            return
        self._forget(peer)
        self._pids[peer] = pid
        self.version += 1
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.gone.add(peer)
            return
        self._peers[pidfd] = peer
        self._epoll.register(pidfd, select.EPOLLIN)
        self._peer_poll.register(pidfd, select.POLLIN)

    def pid_of(self, peer: int) -> int | None:
        """The pid watched for a peer."""
        return self._pids.get(peer)

    def exit_code(self, peer: int) -> int | None:
        """How a dead peer ended, where that can be known; negative for a signal."""
        pidfds = [fd for fd, known in self._peers.items() if known == peer]
        return exit_code_of(pidfds[0]) if pidfds else None

    def wait(self, timeout_s: float | None) -> Wake:
        """Sleep in the kernel. A ring ends one wait."""
        ready = self._epoll.poll(0.0 if self.gone else timeout_s)
        wake = Wake.PEER_GONE if self.gone else Wake.TIMEOUT
        for fd, _ in ready:
            if fd == self.doorbell_fd and len(ready) == 1:
                return Wake.RUNG
            wake = max(wake, self.note(fd))
        return wake

    def note(self, fd: int) -> Wake:
        """Take note of one of `events()` that was found ready."""
        if fd == self.doorbell_fd:
            return Wake.RUNG
        if fd == self._cancel_fd:
            return Wake.CANCELLED
        self.gone.add(self._peers[fd])
        return Wake.PEER_GONE

    def find_gone(self) -> set[int]:
        """Peers that are dead, without waiting."""
        if self._peers:
            for fd, _ in self._peer_poll.poll(0):
                self.gone.add(self._peers[fd])
        return self.gone

    def events(self) -> dict[int, int]:
        """Every descriptor that can end a wait, with the events to register in an epoll."""
        return {
            self.doorbell_fd: select.EPOLLIN | select.EPOLLET,
            self._cancel_fd: select.EPOLLIN,
            **dict.fromkeys(self._peers, select.EPOLLIN),
        }

    def cancel(self) -> None:
        """End this wait and all later ones; from any thread, also from a signal handler."""
        with self._cancel_lock:
            self.is_cancelled = True
            if not self._is_closed:
                os.eventfd_write(self._cancel_fd, 1)

    def close(self) -> None:
        """Close what it owns; may be called again. No wait may be under way."""
        with self._cancel_lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._cancel_fd)
        self._epoll.close()
        for fd in self._peers:
            os.close(fd)
        self._peers.clear()

    def _forget(self, peer: int) -> None:
        self.gone.discard(peer)
        for fd in [fd for fd, known in self._peers.items() if known == peer]:
            del self._peers[fd]
            self._epoll.unregister(fd)
            self._peer_poll.unregister(fd)
            os.close(fd)


class Spinner:
    """Spins for microseconds before a sleep, while that is worth it.

    Worth it only for as many processes as there are CPUs: one more would take the CPU from the one
    it waits for. So of a queue's ends the writer and the first readers may spin, and the other
    readers sleep: they get a CPU whenever a spinner yields. `num_processes` counts this spinner and
    those before it, `spin_us` is its longest spin.

    And by score: a spin that found its message counts for spinning, a spin in vain against it, and
    so a worker that is paced stops after a few. A sleep that a spin would have covered counts for
    trying again. On a busy machine most spins are in vain.
    """

    def __init__(self, num_processes: int, spin_us: int = SHORT_SPIN_US) -> None:
        self._has_cpus = spin_us > 0 and num_processes <= usable_cpus()
        self._spin_ns = spin_us * 1000
        self._score = _MAX_SCORE if self._has_cpus else 0
        self._slept_at_ns = 0

    @property
    def is_worthwhile(self) -> bool:
        """Whether to spin now."""
        return self._score > 0

    def spin(self, is_ready: Callable[[], bool]) -> bool:
        """Whether `is_ready()` became true within a spin."""
        began_ns = time.monotonic_ns()
        end_ns = began_ns + self._spin_ns
        while True:
            found = is_ready()
            now_ns = time.monotonic_ns()
            if found and now_ns < end_ns:
                self._score = min(_MAX_SCORE, self._score + 1)
                return True
            if now_ns > end_ns:
                # Also when found: this process lost its CPU while it spun.
                self._score -= 2
                return found
            # The peer may be queued behind this process, or a thread wait for the interpreter.
            os.sched_yield()

    def sleep_begins(self) -> None:
        """Note when a sleep began."""
        if self._has_cpus:
            self._slept_at_ns = time.monotonic_ns()

    def sleep_ends(self) -> None:
        """A sleep ended with a record."""
        if self._has_cpus and time.monotonic_ns() - self._slept_at_ns < self._spin_ns:
            self._score = min(_MAX_SCORE, self._score + 1)
