"""The root of every error that a user of vcli can cause or must act on."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit codes, the same for every subcommand."""

    OK = 0
    UNFIT = 1
    USAGE = 2
    PEERS_MISSING = 3
    PEERS_DISAGREE = 4
    START_FAILED = 5
    DIED_SERVING = 6
    BUG = 7
    TIMEOUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


class VcliError(Exception):
    """A failure told in one message: what happened with the values, then what mends it.

    `hint` is the command or flag to type next; empty when there is none.
    """

    exit_status: ExitStatus = ExitStatus.BUG

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(VcliError):
    """What the user typed or named is wrong: a flag, a size, a path, a model, a port."""

    exit_status = ExitStatus.USAGE


class PlacementError(ConfigError):
    """Valid sizes that do not fit the nodes or devices."""


class UnfitError(VcliError):
    """The machine or its environment cannot do this, or a needed download failed."""

    exit_status = ExitStatus.UNFIT
