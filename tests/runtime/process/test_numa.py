"""A process is bound by the kernel's own calls, and what is not permitted is said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcli.runtime.process.numa import node_cpus, parse_cpu_list

pytestmark = pytest.mark.process


def run_script(body: str) -> str:
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0,2-2", {0, 2})],
)
def test_list_of_cpus_is_read(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.skipif(not node_cpus(0), reason="the kernel shows no NUMA node")
def test_numa_bind_is_in_force_for_the_process_and_its_threads() -> None:
    policy = run_script(
        "import threading\n"
        "from vcli.runtime.process.numa import bind_to_node, node_cpus\n"
        "import os\n"
        "effect = bind_to_node(0)\n"
        "assert effect.has_cpus and os.sched_getaffinity(0) <= node_cpus(0)\n"
        "thread = threading.Thread(target=lambda: print(effect.has_memory,\n"
        "    'bind:0' in open('/proc/thread-self/numa_maps').read()))\n"
        "thread.start(); thread.join()\n"
    )
    assert policy in ("True True", "False False")


def test_forbidden_memory_binding_ends_no_worker_and_leaves_its_cpus_bound() -> None:
    # 999 does not exist: the kernel refuses it as it refuses everything to some containers.
    out = run_script(
        "import os, vcli.runtime.process.numa as numa\n"
        "numa.node_cpus = lambda node: frozenset(os.sched_getaffinity(0))\n"
        "effect = numa.bind_to_node(999)\n"
        "print(effect.has_cpus, effect.has_memory, effect.problems)\n"
    )
    assert out.startswith("True False ('memory not bound: ")


def test_numa_bind_that_can_do_nothing_is_told_and_not_silent() -> None:
    out = run_script(
        "from vcli.runtime.process.numa import bind_to_node\nprint(bind_to_node(998).problems)\n"
    )
    assert "not bound to its CPUs: this process may use none of them" in out


def test_affinity_that_was_chosen_is_left_alone() -> None:
    first = min(os.sched_getaffinity(0))
    out = run_script(
        "import os\nfrom vcli.runtime.process.numa import bind_to_node\n"
        f"os.sched_setaffinity(0, [{first}])\n"
        "effect = bind_to_node(0, has_affinity=True)\n"
        "print(effect.has_cpus, sorted(os.sched_getaffinity(0)))\n"
    )
    assert out == f"True [{first}]"
    assert Path("/proc/self").exists()
