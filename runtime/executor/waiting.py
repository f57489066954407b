"""How a thread waits for descriptors and for the ranks' replies at once, and how long it spins."""

from collections.abc import Callable, Sequence
from typing import Protocol

from vcli.runtime.config import EngineConfig
from vcli.runtime.ipc.cpus import usable_cpus
from vcli.runtime.ipc.reader_set import ReaderSet
from vcli.topology.decision import Decision
from vcli.topology.spin import LONG_SPIN_US, decide_spin


class Waiter(Protocol):
    """One thread's wait for descriptors, in which it takes the replies of the ranks itself."""

    def wait(self, timeout_s: float | None) -> list[int]:
        """Until a reply was taken or a descriptor is readable (those are given); or in vain."""

    def look(self) -> list[int]:
        """As `wait`, without waiting."""

    def close(self) -> None:
        """Leave the replies to a thread of the executor again."""


class FdWaiter:
    """Of a back end whose replies come from threads of this process: for descriptors alone.

    It may spin while `has_pending` says that no call is in flight: else it would take the
    interpreter from the thread that it waits for.
    """

    def __init__(
        self,
        fds: Sequence[int],
        spin: Decision[int],
        has_pending: Callable[[], bool] = lambda: True,
    ) -> None:
        self._set = ReaderSet([], fds, idle_spin_us=idle_spin_us(spin))
        self._has_pending = has_pending

    def wait(self, timeout_s: float | None) -> list[int]:
        """The descriptors that are readable; none after `timeout_s`."""
        return self._set.wait(timeout_s, expects_record=self._has_pending())[1]

    def look(self) -> list[int]:
        """The descriptors that are readable now."""
        return self._set.look()[1]

    def close(self) -> None:
        """Give back its own descriptors."""
        self._set.close()


def spin_of(config: EngineConfig) -> Decision[int]:
    """The longest spin in the processes of this node, in microseconds."""
    node = config.plan.nodes[config.parallel.node_rank]
    return decide_spin(num_cpus=usable_cpus(), num_processes=len(node.processes))


def idle_spin_us(spin: Decision[int]) -> int:
    """The longest spin where nothing is expected but perhaps the next request: 0 or the long one.

    Each look is a system call there, so it needs a CPU that nobody wants.
    """
    return spin.value if spin.value >= LONG_SPIN_US else 0
