"""Programs that end with the test run, also when that is killed: `bound([program, argument...])`.

The kernel kills such a program with the thread that started it, so that must be one that stays,
like pytest's main thread. What the program started itself has to end by its own means.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def bound(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in the same process, bound to this one."""
    return [sys.executable, "-S", "-E", __file__, str(os.getpid()), *command]


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):  # it has gone already
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
