"""Stacks of real processes, hung ones too, and NCCL's status server as a stand-in."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vcli.cli.doctor_instance_facts import read_pages
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.instances import VcliProcess, read_process
from vcli.diagnostics.ras import ask_ras, ras_address
from vcli.diagnostics.stacks import ThreadStack, dump_stacks, parse_stacks
from vcli.runtime.process.live_page import MEMFD_NAME, SIGNAL, TEXT_END

FILES = HostFiles()
BEGIN = """
import ctypes, os, sys, threading, time
from vcli.runtime.process.live_page import LivePage
page = LivePage()
page.tell(title="Worker_TP0", rank=0)
def say_ready():
    os.write(1, b"ready\\n")
"""
IN_NATIVE_CODE = f"""{BEGIN}
def hang_with_the_interpreter_lock():
    say_ready()
    ctypes.PyDLL(None).sleep(600)
hang_with_the_interpreter_lock()
"""
IN_PYTHON = f"""{BEGIN}
def spin_here():
    say_ready()
    while True:
        time.sleep(0.01)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
spin_here()
"""
WITHOUT_PAGE = "import os, time; os.write(1, b'ready\\n'); time.sleep(600)"


@contextlib.contextmanager
def started(code: str) -> Iterator[VcliProcess]:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        process = read_process(FILES, child.pid)
        assert process is not None
        yield process
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def ask(process: VcliProcess, *, deadline_s: float = 20.0) -> tuple[ThreadStack, ...]:
    assert process.memfds is not None
    return dump_stacks(
        FILES, process, process.memfds[MEMFD_NAME], signum=SIGNAL, begin=TEXT_END,
        deadline_s=deadline_s,
    )  # fmt: skip


@pytest.mark.process
def test_a_main_thread_that_never_gives_the_interpreter_back_shows_its_stack() -> None:
    with started(IN_NATIVE_CODE) as process:
        (main,) = ask(process)
        while main.frames[0].function == "say_ready":  # it is about to return
            (main,) = ask(process)
        assert main.is_main
        assert main.frames[0].function == "hang_with_the_interpreter_lock"


@pytest.mark.process
def test_every_answer_is_whole_and_has_no_part_of_the_one_before() -> None:
    with started(IN_PYTHON) as process:
        for _ in range(20):
            stacks = ask(process)
            assert [thread.is_main for thread in stacks] == [False, True]
            functions = [frame.function for frame in stacks[1].frames]
            assert functions[-2:] == ["spin_here", "<module>"]


@pytest.mark.process
def test_a_descriptor_that_is_another_file_by_now_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.write_text("keep me")
    code = f"{BEGIN}\nfile = open({str(path)!r})\nos.dup2(file.fileno(), 99)\nsay_ready()\n"
    with started(f"{code}time.sleep(600)") as process:
        with pytest.raises(CannotMeasureError, match="99 is no page"):
            dump_stacks(FILES, process, 99, signum=SIGNAL, begin=TEXT_END)
        assert path.read_text() == "keep me"


@pytest.mark.process
def test_two_doctors_do_not_disturb_each_other() -> None:
    with started(IN_PYTHON) as process:
        answers: list[tuple[ThreadStack, ...]] = []

        def ask_often() -> None:
            answers.extend(ask(process) for _ in range(10))

        doctors = [threading.Thread(target=ask_often) for _ in range(2)]
        for doctor in doctors:
            doctor.start()
        for doctor in doctors:
            doctor.join(60)
        assert [len(answer) for answer in answers] == [2] * 20


@pytest.mark.process
def test_a_stopped_process_is_not_waited_for() -> None:
    with started(IN_PYTHON) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with pytest.raises(CannotMeasureError, match=f"kill -CONT {process.pid}"):
            ask(process)


@pytest.mark.process
def test_a_process_without_the_handler_is_not_ended_by_the_question() -> None:
    with started(WITHOUT_PAGE) as process:
        with pytest.raises(CannotMeasureError, match="does not catch SIGUSR1"):
            dump_stacks(FILES, process, 0, signum=SIGNAL, begin=TEXT_END)
        assert read_process(FILES, process.pid) is not None


@pytest.mark.process
def test_a_pid_that_is_another_process_now_is_not_signalled() -> None:
    import dataclasses

    with started(IN_PYTHON) as process:
        earlier = dataclasses.replace(process, start_ticks=process.start_ticks - 1)
        with pytest.raises(CannotMeasureError, match="has ended meanwhile"):
            ask(earlier)


@pytest.mark.process
def test_a_page_is_read_while_the_process_hangs() -> None:
    with started(IN_NATIVE_CODE) as process:
        page = read_pages([process])[process.pid]
        assert page.told == {"title": "Worker_TP0", "rank": 0}
        assert not page.is_in_step


def test_frames_of_every_thread_are_parsed() -> None:
    text = (
        'Thread 0x0000007f (most recent call first):\n  File "/a/b/c/d.py", line 7 in work\n\n'
        'Current thread 0x00000080 (most recent call first):\n  File "x.py", line ??? in <module>\n'
    )
    first, main = parse_stacks(text)
    assert first.frames[0].short == "b/c/d.py:7 work"
    assert (main.is_main, main.frames[0].line) == (True, "???")
    assert parse_stacks("") == ()
    assert parse_stacks('  File "x", line 1 in y\nnonsense') == ()


@contextlib.contextmanager
def ras_server(answer: bytes, *, closes: bool = True) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked: list[bytes] = []
        is_over = threading.Event()

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                asked.append(link.recv(100))
                link.sendall(answer)
                if not closes:
                    is_over.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        is_over.set()
        thread.join(30)
        assert asked == [b"verbose status\n"]


def test_ras_is_asked_in_its_own_words() -> None:
    with ras_server(b"NCCL version 2.30\nJob summary\n") as port:
        assert ask_ras("127.0.0.1", port) == "NCCL version 2.30\nJob summary"


def test_a_ras_server_that_never_ends_is_given_up() -> None:
    late = pytest.raises(CannotMeasureError, match=r"no full answer in 0\.2 s")
    with ras_server(b"half", closes=False) as port, late:
        ask_ras("127.0.0.1", port, deadline_s=0.2)


def test_nobody_listening_is_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CannotMeasureError, match="Connection refused"):
        ask_ras("127.0.0.1", port)


def test_the_address_of_ras_is_that_of_the_variables() -> None:
    assert ras_address({}) == ("localhost", 28028)
    assert ras_address({"NCCL_RAS_ADDR": "[::1]:29000"}) == ("::1", 29000)
    assert ras_address({"NCCL_RAS_ENABLE": "0"}) is None
    for typed in ("nowhere", "host:port", "host:99999"):
        with pytest.raises(CannotMeasureError, match="no host:port"):
            ras_address({"NCCL_RAS_ADDR": typed})
