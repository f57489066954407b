"""A process is bound by the kernel's own calls, and what is not permitted is said."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.child_targets import spec
from vcli.runtime.process import numa
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.numa import bind_to_node, node_cpus, parse_cpu_list

pytestmark = pytest.mark.process

has_node = pytest.mark.skipif(not node_cpus(0), reason="the kernel shows no NUMA node")


@pytest.fixture
def group() -> Iterator[ChildGroup]:
    group = ChildGroup(lambda message: None, lambda report: None)
    yield group
    group.shutdown(1.0, asked=False)


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


@has_node
def test_child_of_a_node_has_its_cpus_and_its_memory(group: ChildGroup) -> None:
    code = "from vcli.runtime.process.numa import bind_to_node as b\nprint(b(0).has_memory)\n"
    is_permitted = run_script(code) == "True"
    group.start([spec("tell_binding", numa_node=0), spec("tell_binding")])
    bound, free = group.wait_ready(20)
    policy = "bind:0" if is_permitted else "default"
    for cpus, policies in bound:
        assert set(cpus) == node_cpus(0) & os.sched_getaffinity(0)
        assert policies == [policy]
    assert all("bind:0" not in policies for _, policies in free)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_child_of_a_node_leaves_the_cpus_of_others_unless_it_was_given_some(
    group: ChildGroup,
) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0))
    server = ForkServer.start(preload=("tests.support.one_cpu_node",))
    try:
        group.start(
            [
                spec("tell_binding", numa_node=0),
                spec("tell_binding", numa_node=0, cpu_affinity=(first, last)),
                spec("tell_binding"),
            ],
            starter=server.starter,
        )
        told = group.wait_ready(20)
    finally:
        group.shutdown(1.0, asked=False)
        server.close()
    all_cpus = sorted(os.sched_getaffinity(0))
    cpus = [[thread[0] for thread in threads] for threads in told]
    assert cpus == [[[last]] * 2, [[first, last]] * 2, [all_cpus] * 2]


def test_child_of_a_node_that_does_not_exist_says_so_and_serves_unbound(
    group: ChildGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    group.start(
        [replace(spec("tell_binding", title="Worker_TP3", numa_node=998), log_level="INFO")]
    )
    ((told, _),) = group.wait_ready(20)
    assert told[0] == sorted(os.sched_getaffinity(0))
    said = capfd.readouterr().err
    assert (
        "WARNING Worker_TP3 vcli.runtime.process.numa: numa node=998 not bound to its CPUs: "
        "this process may use none of them" in said
    )
    assert "WARNING Worker_TP3 vcli.runtime.process.numa: numa node=998 memory not bound: " in said
    assert "numa node=998 cpus=False memory=False" in said


def test_binding_that_the_kernel_accepts_without_effect_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class AcceptsAll:
        def syscall(self, *_: object) -> int:
            return 0

    monkeypatch.setattr(numa.ctypes, "CDLL", lambda *_, **__: AcceptsAll())
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(numa, "node_cpus", lambda _: frozenset({2, 3}))
    with caplog.at_level(logging.WARNING, "vcli"):
        effect = bind_to_node(1)
    assert (effect.has_cpus, effect.has_memory) == (False, False)
    silent = "the kernel accepted it, and did nothing"
    assert caplog.messages == [
        f"numa node=1 not bound to its CPUs: {silent}",
        f"numa node=1 memory not bound: {silent}",
    ]


@has_node
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
