"""How long a reader may spin is decided from CPUs and processes alone."""

import pytest

from vcli.topology.spin import LONG_SPIN_US, SHORT_SPIN_US, decide_spin


@pytest.mark.parametrize(
    ("num_cpus", "num_processes", "expected"),
    [
        (32, 4, LONG_SPIN_US),
        (10, 4, LONG_SPIN_US),
        (9, 4, SHORT_SPIN_US),
        (2, 2, SHORT_SPIN_US),
        (4, 2, SHORT_SPIN_US),
        (32, 16, SHORT_SPIN_US),
    ],
)
def test_long_spins_need_twice_the_cpus_and_some_to_spare(
    num_cpus: int, num_processes: int, expected: int
) -> None:
    decision = decide_spin(num_cpus=num_cpus, num_processes=num_processes)
    assert decision.value == expected


def test_reason_names_both_numbers_and_what_was_needed() -> None:
    (reason,) = decide_spin(num_cpus=8, num_processes=4).reasons
    assert reason.startswith("8 usable CPUs for 4 processes, fewer than 10")
