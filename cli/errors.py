"""From any exception to one message, a hint and an exit status."""

import difflib
import errno
import traceback
from collections.abc import Mapping, Sequence
from typing import Final

import typer

from vcli.cli.output import lost_output
from vcli.topology import ConfigError, ExitStatus, UnfitError, VcliError

_ISSUE_HINT = "this is a bug in vcli: run again with VCLI_DEBUG=1 and report the traceback"
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: How alike names are of which one is the other misspelt, as difflib counts: `prot` and `port`.
_NEAR_RATIO: Final = 0.75
#: Less alike than the nearest by more than this is not near.
_TIE_RATIO: Final = 0.1
_SHORT_CHARS: Final = 2
#: A word that says which flag is meant.
_WORD_CHARS: Final = 5
#: What a system runs out of without a bug of ours, and what mends it.
_EXHAUSTED: Final[Mapping[int, str]] = {
    errno.EMFILE: "raise the limit of open files first: ulimit -n 4096",
    errno.ENFILE: "the whole machine has too many open files: sysctl fs.file-max",
    **dict.fromkeys(_NO_SPACE, "free some space"),
}


def explain_usage_error(
    error: typer.exceptions.TyperException, argv: Sequence[str], known_flags: Sequence[str]
) -> VcliError:
    """A parser's complaint in our form, with the nearest flag for a mistyped one."""
    message = error.format_message().strip()
    unknown = getattr(error, "option_name", None)
    if isinstance(unknown, str):
        typed = _typed_flag(unknown, argv, known_flags)
        if typed in known_flags:  # one without a value got one
            return ConfigError(message, hint=f"see --help for what {typed} takes")
        near = near_flags(typed, known_flags)
        hint = f"did you mean {' or '.join(near)}?" if near else "see --help for the flags"
        return ConfigError(f"no such flag: {typed}", hint=hint)
    parameter = getattr(error, "param", None)
    values = _typed_values(getattr(parameter, "opts", ()), argv)
    # Of a flag that holds one value the last one counts; of another nobody says which is wrong.
    if values and not (len(values) > 1 and getattr(parameter, "multiple", False)):
        value = values[-1]
        if value not in message:
            message = f"{message} (got {value!r})"
    usage_context = getattr(error, "ctx", None)
    path = getattr(usage_context, "command_path", "vcli")
    return ConfigError(message, hint=f"see {path} --help")


def near_flags(typed: str, known_flags: Sequence[str]) -> list[str]:
    """Up to three flags that were probably meant: misspelt, or with words left out; often none."""
    name = typed.strip("-")
    names = {flag: flag.strip("-") for flag in known_flags}
    same = [flag for flag, known in names.items() if known == name]
    if same:  # -port for --port
        return same
    if len(name) <= _SHORT_CHARS:  # -tq for -tp; of a single letter nothing is near
        return [flag for flag, known in names.items() if _differs_by_one(known, name)][:3]
    ratios = {flag: _likeness(name, known) for flag, known in names.items()}
    best = max(_NEAR_RATIO, max(ratios.values(), default=0.0) - _TIE_RATIO)
    words = name.split("-")
    near = [
        flag
        for flag, known in names.items()
        if ratios[flag] >= best or _is_short_for(words, known.split("-"))
    ]
    return sorted(near, key=lambda flag: (-ratios[flag], flag))[:3]


def _likeness(typed: str, known: str) -> float:
    """How alike the names are; 0 where too much is left out of a short one for a slip."""
    if abs(len(typed) - len(known)) > 1 + len(typed) // 6:
        return 0.0
    return difflib.SequenceMatcher(None, typed, known).ratio()


def _differs_by_one(known: str, typed: str) -> bool:
    pairs = zip(known, typed, strict=False)
    return len(known) == len(typed) > 1 and sum(a != b for a, b in pairs) == 1


def _is_short_for(typed: Sequence[str], known: Sequence[str]) -> bool:
    """Whether a flag begins or ends with the one typed word, or holds several in their order."""
    count = len(typed)
    if count == 1:
        return len(typed[0]) >= _WORD_CHARS and typed[0] in (known[0], known[-1])
    rest = iter(known)
    return all(word in rest for word in typed)


def _typed_flag(reported: str, argv: Sequence[str], known_flags: Sequence[str]) -> str:
    """What was typed: the parser reports `-t` for an unknown `-tq`."""
    if reported.startswith("--"):
        return reported
    for token in argv:
        flag = token.split("=", 1)[0]
        if flag.startswith(reported) and not flag.startswith("--") and flag not in known_flags:
            return flag
    return reported


def _typed_values(flags: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The values that were typed behind `flags`; the parser's messages leave them out."""
    values: list[str] = []
    for position, token in enumerate(argv):
        name, separator, value = token.partition("=")
        if name.replace("_", "-") in flags:
            values += [value] if separator else argv[position + 1 : position + 2]
    return values


def explain_crash(error: Exception) -> VcliError:
    """Anything that nobody expected: exit 7, or exit 1 where the system has run out of something.

    The caller tells the traceback, if somebody wants it.
    """
    exhausted = _exhausted(error)
    if exhausted is not None:
        return _explain_exhausted(exhausted)
    place = traceback.extract_tb(error.__traceback__)
    where = f" at {place[-1].filename.rsplit('/', 1)[-1]}:{place[-1].lineno}" if place else ""
    crash = VcliError(f"{type(error).__name__}{where}: {error}", hint=_ISSUE_HINT)
    crash.exit_status = ExitStatus.BUG
    return crash


def _exhausted(error: BaseException | None) -> OSError | None:
    """The first sign that something ran out, under what failed because of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _explain_exhausted(error: OSError) -> VcliError:
    if error.errno in _NO_SPACE and error.filename is None:
        # Files are named; what has no name here is stdout, to which the parser writes its help.
        return lost_output(error)
    about = f" ({error.filename})" if error.filename else ""
    return UnfitError(
        f"the system refuses: {error.strerror}{about}", hint=_EXHAUSTED.get(error.errno or 0, "")
    )
