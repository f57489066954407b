"""How long who waits for a message of the control plane spins before it sleeps."""

from typing import Final

from vcli.topology.decision import Decision

SHORT_SPIN_US: Final = 80
"""About two wake-ups across CPUs, so that one end may begin to spin while the other still sleeps.
Spun only by as many ends of a queue as there are CPUs."""
LONG_SPIN_US: Final = 200
"""About the way of a call to all ranks and back: who has just answered is awake for the next."""
_SPARE_CPUS: Final = 2


def decide_spin(*, num_cpus: int, num_processes: int) -> Decision[int]:
    """Microseconds of the longest spin; `num_cpus` counts what affinity and cgroup quota allow.

    `num_processes` are those of all local instances: front ends, cores, workers.
    """
    needed = 2 * num_processes + _SPARE_CPUS
    counted = f"{num_cpus} usable CPUs for {num_processes} processes"
    if num_cpus >= needed:
        reason = f"{counted}, at least {needed}: a CPU that spins is nobody else's"
        return Decision(name="spin_us", value=LONG_SPIN_US, reasons=(reason,))
    reason = f"{counted}, fewer than {needed}: only ends that have a CPU spin, and shortly"
    return Decision(name="spin_us", value=SHORT_SPIN_US, reasons=(reason,))
