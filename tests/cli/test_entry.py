"""^C before a command runs: while its modules are imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Interrupts this process in the midst of the import of MODULE, as a terminal would.
_INTERRUPTED_IMPORT = """
import builtins, os, runpy, signal, sys
real = builtins.__import__
def interrupted(name, *rest, **more):
    if name == MODULE:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **more)
builtins.__import__ = interrupted
sys.argv = ["vcli", "version"]
"""
_MODULE = "runpy.run_module('vcli.cli', run_name='__main__')\n"
_CONSOLE = (
    "from importlib.metadata import entry_points\n"
    "(script,) = entry_points(group='console_scripts', name='vcli')\n"
    "sys.exit(script.load()())\n"
)


def run_script(module: str, entry: str, before: str = "") -> subprocess.CompletedProcess[str]:
    script = before + _INTERRUPTED_IMPORT.replace("MODULE", repr(module)) + entry
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


@pytest.mark.process
@pytest.mark.parametrize("entry", [_MODULE, _CONSOLE], ids=["module", "console"])
@pytest.mark.parametrize("module", ["vcli.cli.main", "typer", "vcli.topology"])
def test_ctrl_c_while_the_commands_are_imported_is_130_without_a_traceback(
    module: str, entry: str
) -> None:
    done = run_script(module, entry)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.process
def test_ignored_interrupt_stays_ignored() -> None:
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = run_script("vcli.cli.main", _MODULE, before=ignore)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
