"""`fork`, asked for: the server is a copy of this process, and only where that is safe."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vcli.runtime.process.facts import main_has_guard, process_facts, ray_environ
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.fork_safety import fork_problem, loaded_libgomps
from vcli.topology.errors import UnfitError

pytestmark = pytest.mark.process

_ROOT = str(Path(__file__).parents[3])


def run_script(body: str) -> str:
    """What a process of its own, with one thread, prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {_ROOT!r})\n{body}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_children_are_copies_of_this_process_without_its_files_and_output() -> None:
    out = run_script("""
import os, tempfile
from pathlib import Path
marker = tempfile.TemporaryFile()  # an open file that no child may have
sys.stdout.write("before ")        # waits in the buffer; must not be written twice
from tests.support.fork_children import *
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.child import ChildSpec
os.IN_MEMORY = "of the original"
server = ForkServer.start("fork", preload=())
group = ChildGroup(lambda m: None, lambda r: None)
group.start([ChildSpec(target="tests.support.fork_children:tell_descriptors", arguments=([],),
                       title="C") for _ in range(2)], starter=server.starter)
told = group.wait_ready(30)
for listed, _ in told:
    kinds = sorted(target.split(":")[0] for number, target in listed if number > 2)
    assert kinds == ["/memfd", "/memfd", "pipe", "pipe", "pipe", "socket"], listed
    assert dict(map(tuple, listed))[0] == "/dev/null"
for pid in group.pids:
    assert f"PPid:\\t{server.pid}\\n" in Path(f"/proc/{pid}/status").read_text()
assert os.getpgid(server.pid) == server.pid
group.shutdown(1.0, asked=False)
server.close()
assert not os.path.exists(f"/proc/{server.pid}")
print("after")
""")
    assert out == "before after\n"


def test_openmp_pool_is_let_go_before_the_fork_and_works_on_both_sides() -> None:
    out = run_script("""
import os, torch
torch.ones(2_000_000).add(1).sum()
assert len(os.listdir("/proc/self/task")) > 1, "no pool, nothing is tested"
from tests.support.fork_children import *
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.facts import process_facts
from vcli.runtime.process.fork_owner import ForkServer
from vcli.topology import decide_start_method
facts = process_facts(os.environ, wants_fork=True)
assert decide_start_method(facts, "fork").value == "fork", facts
server = ForkServer.start("fork", preload=())
group = ChildGroup(lambda m: None, lambda r: None)
group.start([ChildSpec(target="tests.support.fork_children:multiply", arguments=(), title="C",
                       environ={"OMP_NUM_THREADS": str(n)}) for n in (1, 3)],
            starter=server.starter)
(one, three) = group.wait_ready(30)
assert one[0] == three[0] == 600.0 ** 3 + 4_000_000, (one, three)
assert (one[1], three[1]) == (1, 3), (one, three)
assert three[2] > one[2], (one, three)
assert float(torch.ones(2_000_000).add(1).sum()) == 4_000_000
group.shutdown(1.0, asked=False)
server.close()
print("well")
""")
    assert out == "well\n"


def test_second_thread_stands_against_a_copy_and_is_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="busy")
    thread.start()
    try:
        assert "threads are alive" in fork_problem()
        with pytest.raises(UnfitError, match="threads are alive"):
            ForkServer.start("fork")
        assert process_facts({}).num_threads >= 2
    finally:
        stop.set()
        thread.join()


def test_facts_name_who_used_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def is_initialized(self) -> bool:
            return True

    class Torch:
        cuda = Device()
        xpu = Device()

    monkeypatch.setitem(sys.modules, "torch", Torch())
    assert process_facts({}).cuda_initialized_by == "torch"
    monkeypatch.setitem(sys.modules, "bitsandbytes", Torch())
    facts = process_facts({"OMP_NUM_THREADS": "4,2"}, numa_bind=True)
    assert (facts.cuda_initialized, facts.cuda_initialized_by) == (True, "bitsandbytes")
    assert (facts.xpu_initialized, facts.numa_bind, facts.omp_num_threads) == (True, True, 4)


@pytest.mark.parametrize("actor_id", [None, "abc"])
def test_address_of_rays_cluster_is_passed_on_by_an_actor(
    monkeypatch: pytest.MonkeyPatch, actor_id: str | None
) -> None:
    class Context:
        gcs_address = "10.0.0.1:6379"

        def get_actor_id(self) -> str | None:
            return actor_id

    class Util:
        def get_current_placement_group(self) -> None:
            return None

    class Ray:
        util = Util()

        def is_initialized(self) -> bool:
            return True

        def get_runtime_context(self) -> Context:
            return Context()

    monkeypatch.setitem(sys.modules, "ray", Ray())
    assert process_facts({}).in_ray_actor is (actor_id is not None)
    assert ray_environ() == ({"RAY_ADDRESS": "10.0.0.1:6379"} if actor_id else {})


def test_without_ray_there_is_nothing_to_pass_on() -> None:
    assert ray_environ() == {}


@pytest.mark.parametrize(
    ("source", "has_guard"),
    [
        ("import x\nif __name__ == '__main__':\n    x.go()\n", True),
        ("if '__main__' == __name__: pass\n", True),
        ("import x\nx.go()\n", False),
        ("if x == '__main__': pass\n", False),
        ("this is no Python", None),
    ],
)
def test_guard_of_the_main_module_is_found(
    tmp_path: Path, source: str, has_guard: bool | None
) -> None:
    path = tmp_path / "script.py"
    path.write_text(source)
    main = type(sys)("__main__")
    main.__file__ = str(path)
    assert main_has_guard(main) is has_guard
    assert main_has_guard(type(sys)("__main__")) is None


def test_libgomp_of_torch_is_found() -> None:
    out = run_script("""
from vcli.runtime.process.fork_safety import has_stuck_libgomp, loaded_libgomps
assert loaded_libgomps() == []
import torch
print(len(loaded_libgomps()), has_stuck_libgomp())
""")
    assert out == "1 False\n"
    assert isinstance(loaded_libgomps(), list)
