"""`vcli doctor --watch`: the same run again and again, and what changed, until ^C."""

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.views.report import closing_line
from vcli.diagnostics import CheckContext, Report
from vcli.diagnostics.changes import Change, changes_between
from vcli.topology import ConfigError, ExitStatus

DEFAULT_SECONDS: Final = 5.0
_LEAST_S: Final = 0.5
_MOST_S: Final = 86_400.0
_SECONDS: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)s?", re.IGNORECASE)
_KEPT_CHANGES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run: its report, what it was made from, both views of it."""

    report: Report
    context: CheckContext
    text: str
    document: dict[str, Any]


def take_seconds(words: Sequence[str]) -> tuple[list[str], float]:
    """The words that are no number, and the seconds between two runs: `--watch 5`, `--watch 2s`.

    Raises:
        ConfigError: two numbers, or one out of range.
    """
    numbers = [word for word in words if _SECONDS.fullmatch(word)]
    rest = [word for word in words if word not in numbers]
    if not numbers:
        return rest, DEFAULT_SECONDS
    seconds = float(numbers[0].lower().rstrip("s"))
    if len(numbers) > 1 or not _LEAST_S <= seconds <= _MOST_S:
        raise ConfigError(
            f"--watch {' '.join(numbers)}: one number of seconds from {_LEAST_S:g} to {_MOST_S:g}",
            hint=f"--watch {DEFAULT_SECONDS:g}",
        )
    return rest, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorWatch:
    """Shows rounds: drawn anew on a terminal, else a line for each change.

    With --json each round is one document on a line of its own.
    """

    environment: Environment
    output: Output
    interval_s: float

    def run(self, examine: Callable[[], Round]) -> int:
        """Until ^C, which is exit status 130; a round begins `interval_s` after the last one did.

        Raises:
            VcliError: what a round raises.
        """
        previous: Round | None = None
        recent: list[str] = []
        try:
            while True:
                begin = time.monotonic()
                current = examine()
                if current.report.is_interrupted:
                    return int(ExitStatus.INTERRUPTED)
                changes = (
                    changes_between(previous.report.results, current.report.results)
                    if previous is not None
                    else ()
                )
                recent = [*recent, *(_line(change) for change in changes)][-_KEPT_CHANGES:]
                self._show(current, changes, recent, is_first=previous is None)
                previous = current
                time.sleep(max(0.0, begin + self.interval_s - time.monotonic()))
        except KeyboardInterrupt:
            return int(ExitStatus.INTERRUPTED)

    def _show(
        self, current: Round, changes: Sequence[Change], recent: Sequence[str], *, is_first: bool
    ) -> None:
        if self.output.json_mode:
            self.output.result(_json_line(current, changes))
        elif self._can_redraw:
            self._draw(current, recent, is_first=is_first)
        elif is_first:
            self.output.result(current.text)
        else:
            for change in changes:
                self.output.result(_line(change))

    @property
    def _can_redraw(self) -> bool:
        return self.environment.stdout.isatty() and self.environment.environ.get("TERM") != "dumb"

    def _draw(self, current: Round, recent: Sequence[str], *, is_first: bool) -> None:
        size = shutil.get_terminal_size((80, 24))
        foot = [
            "",
            *(["changes"] if recent else []),
            *(f"  {line}" for line in recent),
            f"every {self.interval_s:g} s, last {time.strftime('%H:%M:%S')}; ^C ends",
        ]
        lines = current.text.splitlines()
        room = max(4, size.lines - len(foot) - 1)
        if len(lines) > room:
            # The closing line stays; what is cut is in a run without --watch.
            hidden = len(lines) - room + 1
            lines = [*lines[: room - 2], f"… {hidden} more lines", closing_line(current.report)]
        cut = [_cut(line, size.columns) for line in (*lines, *foot)]
        # Each line is cleared behind its end, so that nothing flickers.
        text = "\x1b[H" + "\n".join(f"{line}\x1b[K" for line in cut) + "\x1b[J"
        self.output.result(f"\x1b[2J{text}" if is_first else text)


def _json_line(current: Round, changes: Sequence[Change]) -> str:
    whole = {
        "schema": "vcli.doctor/1",
        "exit_code": int(current.report.exit_status),
        **current.document,
        "since_last": [
            {"id": c.id, "kind": c.kind.value, "before": c.before.measured, "now": c.now.measured}
            for c in changes
        ],
    }
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def _line(change: Change) -> str:
    return f"{time.strftime('%H:%M:%S')} {change.describe()}"


def _cut(line: str, width: int) -> str:
    """The line in so many columns; escape sequences take none."""
    shown, rest = 0, []
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if part.startswith("\x1b"):
            rest.append(part)
            continue
        rest.append(part[: max(0, width - shown)])
        shown += len(part)
    return "".join(rest)
