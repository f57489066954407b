"""Percentiles and host facts of a benchmark."""

import os
import time

import pytest

from vcli.runtime.bench.stats import Summary, cpu_seconds, host_facts


def test_a_summary_holds_samples_and_not_interpolations():
    summary = Summary.of([float(value) for value in range(100, 0, -1)])
    assert (summary.count, summary.min, summary.p50, summary.p99, summary.max) == (
        100, 1.0, 50.0, 99.0, 100.0,
    )  # fmt: skip


def test_one_sample_is_every_percentile():
    assert Summary.of([3.0]) == Summary(count=1, min=3.0, p50=3.0, p99=3.0, max=3.0)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        Summary.of([])


def test_host_facts_name_the_machine_the_versions_and_the_day():
    facts = host_facts()
    assert facts.cpu
    assert facts.num_cpus == len(os.sched_getaffinity(0))
    assert set(facts.versions) == {"vcli-toolkit", "msgspec"}
    assert facts.date.endswith("+00:00")


def test_cpu_seconds_of_a_process_are_those_it_counts_itself():
    own, seen = time.process_time(), cpu_seconds(os.getpid())
    assert 0 <= seen - own < 0.05
