"""The one way out: results on stdout, talk on stderr.

With `--json` stdout carries exactly one document with `schema` and `exit_code`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from typing import Any, Final, TextIO

from vcli.cli.environment import Environment, silence
from vcli.cli.views.text import hanging
from vcli.topology import ExitStatus, UnfitError, VcliError

#: Columns of a result that no terminal shows.
_PIPE_WIDTH: Final = 100
_PLAIN_MARKS = {
    "✓": "[ok]",
    "✗": "[FAIL]",
    "→": "->",
    "·": "-",
    "…": "...",
    "×": "x",
    "µ": "u",
}


class LostOutputError(UnfitError):
    """The result could not be written to stdout; only stderr is left to say so."""


class Output:
    """Writes for people or for programs; marks fall back to ASCII where a stream lacks them."""

    def __init__(self, environment: Environment, *, json_mode: bool = False) -> None:
        self.environment = environment
        self.json_mode = json_mode

    @property
    def width(self) -> int:
        """Columns to fill: the terminal's, or 100 when stdout is none."""
        if not self.environment.stdout.isatty():
            return _PIPE_WIDTH
        return shutil.get_terminal_size((80, 24)).columns

    @property
    def note_width(self) -> int:
        """Columns to fill with notes: those of the terminal that shows stderr, else 100."""
        return self._stderr_width or _PIPE_WIDTH

    @property
    def _stderr_width(self) -> int | None:
        """None where stderr is no terminal: lines stay whole there."""
        stream = self.environment.stderr
        try:
            return os.get_terminal_size(stream.fileno()).columns or None
        except (OSError, ValueError):
            return None

    def result(self, text: str) -> None:
        """Print the result, for people.

        Raises:
            LostOutputError: stdout cannot be written, a full disk for example.
        """
        self._write_result(text)

    def document(
        self, schema: str, content: Mapping[str, Any], exit_status: ExitStatus = ExitStatus.OK
    ) -> None:
        """Print the result as the one JSON document.

        Raises:
            LostOutputError: stdout cannot be written.
        """
        whole = {"schema": schema, "exit_code": int(exit_status), **content}
        self._write_result(json.dumps(whole, indent=2, ensure_ascii=False))

    def note(self, text: str, *, hang: int | None = 2) -> None:
        """Say something beside the result; where stderr cannot be written, nobody hears it.

        On a terminal lines end between words, and go on `hang` columns in; None: as they are.
        """
        self._say(text if hang is None else self._folded(text, hang=hang))

    def _folded(self, text: str, *, hang: int) -> str:
        width = self._stderr_width
        return text if width is None else "\n".join(hanging(text, width=width, hang=hang))

    def _say(self, text: str) -> None:
        try:
            _write(self.environment.stderr, text)
        except OSError:
            silence(self.environment.stderr)

    def error(self, error: VcliError) -> None:
        """Say what went wrong and what mends it."""
        if self.json_mode and not isinstance(error, LostOutputError):
            content = {"message": error.message, "hint": error.hint}
            try:
                self.document("vcli.error/1", content, error.exit_status)
            except BrokenPipeError:
                silence(self.environment.stdout)
            except LostOutputError as lost:
                self.note_error(error)
                self.note_error(lost)
            return
        self.note_error(error)

    def note_error(self, error: VcliError) -> None:
        """Say it on stderr, beside a result."""
        lead = "error: "
        message = self._folded(lead + error.message, hang=len(lead)).removeprefix(lead)
        self._say(self._red(lead) + message)
        if error.hint:
            self.note(f"  → {error.hint}", hang=4)

    def _write_result(self, text: str) -> None:
        try:
            _write(self.environment.stdout, text)
        except BrokenPipeError:  # whoever reads has enough: no failure
            raise
        except OSError as error:
            silence(self.environment.stdout)
            raise lost_output(error) from error

    def _red(self, text: str) -> str:
        if self.environment.has_color(self.environment.stderr):
            return f"\x1b[1;31m{text}\x1b[0m"
        return text


def lost_output(error: OSError) -> LostOutputError:
    """What to say when stdout cannot be written."""
    return LostOutputError(
        f"the result cannot be written to stdout: {error.strerror or error}",
        hint="free some space, or let stdout lead elsewhere",
    )


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        for mark, plain in _PLAIN_MARKS.items():
            text = text.replace(mark, plain)
        text = text.encode(encoding, "replace").decode(encoding)
    stream.write(text + "\n")
    stream.flush()
