"""Running instances in made-up trees of /proc: who owns whom, and what is left over."""

from pathlib import Path

import pytest

from tests.support.fake_host import make_tree
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.instances import (
    find_memfd_holders,
    find_processes,
    group_instances,
    is_front_command,
    read_process,
)

SERVE = "/opt/python3\0/opt/bin/vcli\0serve\0model"


def proc_of(
    pid: int, command: str, *, parent: int = 1, start: int = 0, state: str = "S"
) -> dict[str, str]:
    fields = [state, str(parent), *["0"] * 9, "150", "50", *["0"] * 4, "3", "0", str(start or pid),
              "0", "0"]  # fmt: skip
    return {
        f"proc/{pid}/cmdline": command,
        f"proc/{pid}/stat": f"{pid} (a (strange) name) {' '.join(fields)}",
        f"proc/{pid}/status": "Name:\tx\nUid:\t0\t0\t0\t0\nVmRSS:\t  2048 kB\n",
        f"proc/{pid}/fd/.keep": "",
    }


def files_of(tmp_path: Path, *processes: dict[str, str]) -> HostFiles:
    tree = {name: text for process in processes for name, text in process.items()}
    init = {"proc/1/cmdline": "/sbin/init", "proc/uptime": "1000.0 1.0"}
    return HostFiles(make_tree(tmp_path / "root", {**init, **tree}))


def family(owner: int) -> tuple[dict[str, str], ...]:
    return (
        proc_of(owner, SERVE),
        proc_of(owner + 1, "vcli::ForkServer", parent=owner),
        proc_of(owner + 2, "vcli::EngineCore", parent=owner + 1),
        proc_of(owner + 3, "vcli::Worker_TP0 (starting)", parent=owner + 1),
    )


@pytest.mark.parametrize(
    ("argv", "is_front"),
    [
        (["/opt/bin/vcli", "serve", "m"], True),
        (["/opt/bin/python3.12", "/opt/bin/vcli", "launch"], True),
        (["python", "-P", "-m", "vcli.cli", "serve"], True),
        (["python", "-m", "vcli.cli", "doctor"], False),
        (["timeout", "90", "vcli", "serve"], False),
        (["bash", "-c", "vcli serve m"], False),
        (["grep", "vcli", "serve"], False),
        (["vim", "vcli"], False),
        ([""], False),
    ],
)
def test_only_the_command_itself_is_an_owner(argv: list[str], is_front: bool) -> None:
    assert is_front_command(argv) is is_front


def test_children_of_the_fork_server_belong_to_its_owner(tmp_path: Path) -> None:
    files = files_of(tmp_path, *family(100), *family(200))
    instances, orphans = group_instances(find_processes(files), files)
    assert [item.owner.pid for item in instances] == [100, 200]
    assert [process.pid for process in instances[0].processes] == [101, 102, 103]
    assert orphans == ()


def test_a_process_with_process_1_as_its_parent_is_left_over(tmp_path: Path) -> None:
    orphan = proc_of(300, "vcli::Worker_TP1", parent=1)
    files = files_of(tmp_path, *family(100), orphan)
    instances, orphans = group_instances(find_processes(files), files)
    assert len(instances) == 1
    assert [process.pid for process in orphans] == [300]


def test_what_a_process_says_of_its_parent_counts_more_than_the_kernel(tmp_path: Path) -> None:
    """The fork server was killed, and process 1 has adopted its children."""
    adopted = proc_of(102, "vcli::EngineCore", parent=1)
    files = files_of(tmp_path, proc_of(100, SERVE), adopted)
    instances, orphans = group_instances(find_processes(files), files, {102: 100})
    assert orphans == ()
    assert [process.pid for process in instances[0].processes] == [102]


def test_a_program_that_uses_vcli_is_an_owner_too_and_never_the_latest(tmp_path: Path) -> None:
    library = proc_of(900, "/opt/python3\0train.py")
    worker = proc_of(901, "vcli::Worker_TP0", parent=900)
    files = files_of(tmp_path, *family(100), library, worker)
    instances, orphans = group_instances(find_processes(files), files)
    assert [item.owner.pid for item in instances] == [900, 100]
    assert orphans == ()


def test_a_server_that_is_process_1_of_a_container_owns_its_children(tmp_path: Path) -> None:
    files = files_of(
        tmp_path,
        {"proc/1/cmdline": SERVE},
        {k: v for k, v in proc_of(1, SERVE, parent=0).items() if k != "proc/1/cmdline"},
        proc_of(7, "vcli::EngineCore", parent=1),
    )
    instances, orphans = group_instances(find_processes(files), files)
    assert orphans == ()
    assert [process.pid for process in instances[0].processes] == [7]


def test_parents_in_a_circle_end(tmp_path: Path) -> None:
    files = files_of(tmp_path, proc_of(5, "vcli::A", parent=6), proc_of(6, "vcli::B", parent=5))
    instances, orphans = group_instances(find_processes(files), files)
    assert len(instances) + len(orphans) > 0


def test_a_zombie_and_a_cut_stat_are_no_process(tmp_path: Path) -> None:
    files = files_of(
        tmp_path,
        proc_of(8, "vcli::A", state="Z"),
        {"proc/9/cmdline": "vcli::B", "proc/9/stat": "9 (x"},
    )
    assert find_processes(files) == ()


def test_facts_are_those_of_proc(tmp_path: Path) -> None:
    files = files_of(tmp_path, proc_of(77, "vcli::Worker_TP0", start=5000))
    process = read_process(files, 77)
    assert process is not None
    assert (process.name, process.rss_bytes, process.cpu_seconds) == ("Worker_TP0", 2 << 20, 2.0)
    assert (process.num_threads, process.age_s) == (3, 950.0)


def test_memory_of_vcli_in_a_process_without_parent_is_left_over(tmp_path: Path) -> None:
    files = files_of(
        tmp_path, proc_of(50, "sleep\0100", parent=1), proc_of(51, "python\0x.py", parent=40),
        proc_of(40, "bash"),
    )  # fmt: skip
    for pid in (50, 51):
        link = files.path(f"/proc/{pid}/fd/4")
        link.symlink_to("/memfd:vcli-broadcast (deleted)")
    assert find_memfd_holders(files, ()) == {50: ("vcli-broadcast",)}
    assert find_memfd_holders(files, (50,)) == {}
