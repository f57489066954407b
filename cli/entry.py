"""The console script: a ^C ends it without a traceback from its first line on."""

import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

#: `ExitStatus.INTERRUPTED`, which is imported too late.
_INTERRUPTED: Final = 130


def run() -> None:
    """Import the commands and run the one that was typed."""
    try:
        # An exception in the midst of an import may be wrapped, or printed and lost.
        is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_usual:
            signal.signal(signal.SIGINT, _leave)
        from vcli.cli.main import run as run_command

        if is_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """Nothing was opened or written yet."""
    os._exit(_INTERRUPTED)
