"""What flags that take seconds may say."""

from typing import Final

from vcli.runtime.config import DeadlineConfig
from vcli.topology import ConfigError

#: No process starts, and no full step is sure to end, in less.
_LEAST_S: Final = 1.0
#: A drain this short lets no request end: that is 0.
_LEAST_DRAIN_S: Final = 0.1
#: A week: a wait that long is a mistake.
_MOST_S: Final = 7 * 86400


def check_duration(flag: str, seconds: float, *, usual_s: float) -> None:
    """Whether a deadline is one that can be met, and that comes.

    Raises:
        ConfigError: it is not (nan, too); the hint has the flag as it is by default.
    """
    if not _LEAST_S <= seconds <= _MOST_S:
        raise ConfigError(
            f"{flag} {seconds:g} must be at least {_LEAST_S:g} second and at most {_MOST_S}",
            hint=f"{flag} {usual_s:g}",
        )


def check_deadlines(deadlines: DeadlineConfig) -> None:
    """The deadlines of an engine.

    Raises:
        ConfigError: one can't be met, or never comes.
    """
    usual = DeadlineConfig()
    for flag, seconds, usual_s in (
        ("--start-timeout", deadlines.start_s, usual.start_s),
        ("--execute-model-timeout", deadlines.execute_model_s, usual.execute_model_s),
        ("--stall-timeout", deadlines.stall_s, usual.stall_s),
    ):
        check_duration(flag, seconds, usual_s=usual_s)
    if deadlines.drain_s and not _LEAST_DRAIN_S <= deadlines.drain_s <= _MOST_S:
        raise ConfigError(
            f"--shutdown-timeout {deadlines.drain_s:g} must be 0, or at least {_LEAST_DRAIN_S:g} "
            f"seconds and at most {_MOST_S}",
            hint="--shutdown-timeout 0 aborts running requests at once",
        )
