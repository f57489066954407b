"""From any exception to one message, a hint and an exit status."""

import difflib
import sys
import traceback
from collections.abc import Sequence

import typer

from vcli.topology import ConfigError, ExitStatus, VcliError

_ISSUE_HINT = "this is a bug in vcli: run again with VCLI_DEBUG=1 and report the traceback"


def explain_usage_error(
    error: typer.exceptions.TyperException, argv: Sequence[str], known_flags: Sequence[str]
) -> VcliError:
    """A parser's complaint in our form, with the nearest flag for a mistyped one."""
    message = error.format_message().strip()
    unknown = getattr(error, "option_name", None)
    if isinstance(unknown, str):
        typed = _typed_flag(unknown, argv, known_flags)
        near = difflib.get_close_matches(typed, known_flags, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see --help for the flags"
        return ConfigError(f"no such flag: {typed}", hint=hint)
    parameter = getattr(error, "param", None)
    value = _typed_value(getattr(parameter, "opts", ()), argv)
    if value is not None and value not in message:
        message = f"{message} (got {value!r})"
    usage_context = getattr(error, "ctx", None)
    path = getattr(usage_context, "command_path", "vcli")
    return ConfigError(message, hint=f"see {path} --help")


def _typed_flag(reported: str, argv: Sequence[str], known_flags: Sequence[str]) -> str:
    """What was typed: the parser reports `-t` for an unknown `-tq`."""
    if reported.startswith("--"):
        return reported
    for token in argv:
        flag = token.split("=", 1)[0]
        if flag.startswith(reported) and not flag.startswith("--") and flag not in known_flags:
            return flag
    return reported


def _typed_value(flags: Sequence[str], argv: Sequence[str]) -> str | None:
    """The value that was typed behind one of `flags`; the parser's messages leave it out."""
    for position, token in enumerate(argv):
        name, separator, value = token.partition("=")
        if name.replace("_", "-") in flags:
            if separator:
                return value
            return argv[position + 1] if position + 1 < len(argv) else None
    return None


def explain_crash(error: Exception, *, is_debug: bool) -> VcliError:
    """Anything that nobody expected: exit 7; the traceback only with VCLI_DEBUG=1."""
    if is_debug:
        traceback.print_exception(error, file=sys.stderr)
    place = traceback.extract_tb(error.__traceback__)
    where = f" at {place[-1].filename.rsplit('/', 1)[-1]}:{place[-1].lineno}" if place else ""
    crash = VcliError(f"{type(error).__name__}{where}: {error}", hint=_ISSUE_HINT)
    crash.exit_status = ExitStatus.BUG
    return crash
