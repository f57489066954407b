"""The watchdog prints the stacks of work that does not end, and costs short work nothing.

In processes of their own: the interpreter has one such timer, and pytest uses it.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

COUNT = """
import pathlib, time
from vcli.runtime.worker.watchdog import Watchdog

def switches():
    text = pathlib.Path(f"/proc/self/task/{dog._thread.native_id}/status").read_text()
    return int(text.partition("\\nvoluntary_ctxt_switches:")[2].split()[0])

dog = Watchdog(60.0)
before = switches()
for _ in range(300):
    dog.begin()
    dog.end()
    time.sleep(0.0005)
print(switches() - before)
dog.close()
"""

HANG = """
import time
from vcli.runtime.worker.watchdog import Watchdog

dog = Watchdog(0.2)
for _ in range(3):
    dog.begin()
    dog.end()

def never_ends():
    dog.begin()
    time.sleep(1.5)

never_ends()
dog.close()
"""


KEEPS_THE_INTERPRETER = """
import ctypes, time
from vcli.runtime.worker.watchdog import Watchdog

dog = Watchdog(0.4)

def never_ends():
    dog.begin()
    time.sleep(0.2)  # runs for a while before it keeps the interpreter
    ctypes.PyDLL(None).usleep(2_500_000)

never_ends()
dog.close()
"""


def output_of(code: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout, done.stderr


def test_short_work_does_not_wake_the_watchdog_each_time() -> None:
    assert int(output_of(COUNT)[0]) < 30


def test_work_that_hangs_after_short_work_has_its_stack_printed() -> None:
    assert "never_ends" in output_of(HANG)[1]


def test_stacks_come_also_while_native_code_keeps_the_interpreter() -> None:
    assert output_of(KEEPS_THE_INTERPRETER)[1].count("never_ends") == 1
