"""The one way out: results on stdout, talk on stderr.

With `--json` stdout carries exactly one document with `schema` and `exit_code`.
"""

import json
import shutil
from collections.abc import Mapping
from typing import Any, TextIO

from vcli.cli.environment import Environment
from vcli.topology import ExitStatus, VcliError

_PLAIN_MARKS = {
    "✓": "[ok]",
    "✗": "[FAIL]",
    "→": "->",
    "·": "-",
    "…": "...",
    "×": "x",
    "µ": "u",
}


class Output:
    """Writes for people or for programs; marks fall back to ASCII where a stream lacks them."""

    def __init__(self, environment: Environment, *, json_mode: bool = False) -> None:
        self.environment = environment
        self.json_mode = json_mode

    @property
    def width(self) -> int:
        """Columns to fill: the terminal's, or 100 when stdout is none."""
        if not self.environment.stdout.isatty():
            return 100
        return shutil.get_terminal_size((80, 24)).columns

    def result(self, text: str) -> None:
        """Print the result, for people."""
        _write(self.environment.stdout, text)

    def document(
        self, schema: str, content: Mapping[str, Any], exit_status: ExitStatus = ExitStatus.OK
    ) -> None:
        """Print the result as the one JSON document."""
        whole = {"schema": schema, "exit_code": int(exit_status), **content}
        _write(self.environment.stdout, json.dumps(whole, indent=2, ensure_ascii=False))

    def note(self, text: str) -> None:
        """Say something beside the result."""
        _write(self.environment.stderr, text)

    def error(self, error: VcliError) -> None:
        """Say what went wrong and what mends it."""
        if self.json_mode:
            content = {"message": error.message, "hint": error.hint}
            self.document("vcli.error/1", content, error.exit_status)
            return
        _write(self.environment.stderr, self._red("error: ") + error.message)
        if error.hint:
            _write(self.environment.stderr, f"  → {error.hint}")

    def _red(self, text: str) -> str:
        if self.environment.has_color(self.environment.stderr):
            return f"\x1b[1;31m{text}\x1b[0m"
        return text


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
