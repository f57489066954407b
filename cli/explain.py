"""`vcli explain`: what a check is about, or what a log says; causes of our own failures too."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.views.explanation import check_view, explanation_view
from vcli.cli.views.report import list_view
from vcli.diagnostics import Check, CheckRegistry, detect_dialect
from vcli.diagnostics.explain import explain_log, explain_text
from vcli.runtime.errors import ReportedError
from vcli.topology import ConfigError, ExitStatus, VcliError

_CHUNK_BYTES: Final = 1 << 20
_CHECK_ID: Final = re.compile(r"[A-Za-z]+-\d+")
#: First bytes of files that are no logs -> what they are, and what makes a log of them.
_MAGIC: Final = {
    b"\x1f\x8b": ("compressed (gzip)", "zcat {path} | vcli explain -"),
    b"\x28\xb5\x2f\xfd": ("compressed (zstd)", "zstdcat {path} | vcli explain -"),
    b"\xfd7zXZ": ("compressed (xz)", "xzcat {path} | vcli explain -"),
    b"PK\x03\x04": ("a zip archive", "unzip -p {path} | vcli explain -"),
    b"\x7fELF": ("a program", "name a log"),
}
_CONTROLS: Final = bytes(set(range(32)) - set(b"\t\n\r\b\f\x1b")) + b"\x7f"
_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
_LOG_HINT: Final = "vcli explain FILE, or: kubectl logs POD | vcli explain -"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainSession:
    """One `vcli explain`."""

    environment: Environment
    output: Output
    registry: CheckRegistry

    def run(self, word: str) -> int:
        """Explain a check, a group or a log; gives the exit status.

        Raises:
            ConfigError: `word` is none of them, or the log cannot be read.
        """
        if not word:
            raise ConfigError("the name to explain is empty", hint=_LOG_HINT)
        if word != "-" and self.registry.has(word):
            return self._explain_checks(word)
        return self._explain_log(word)

    def _explain_checks(self, word: str) -> int:
        checks = self.registry.select([word])
        if self.output.json_mode:
            entries = [_check_json(check) for check in checks]
            self.output.document("vcli.explain/1", {"matches": [], "checks": entries})
        elif word.upper() == checks[0].id:
            dialect = detect_dialect(self.environment.environ)
            self.output.result(check_view(checks[0], dialect, width=self.output.width))
        else:
            self.output.result(list_view(checks))
        return int(ExitStatus.OK)

    def _explain_log(self, word: str) -> int:
        name = "stdin" if word == "-" else word
        with self._open(word) as stream:
            explained = explain_log(_text_chunks(stream, name))
        if self.output.json_mode:
            first = explained.first_failure
            content = {
                "matches": [match.to_json() for match in explained.matches],
                "first_failure": None
                if first is None
                else {"line": first.line, "text": first.text, "speaker": first.speaker},
            }
            self.output.document("vcli.explain/1", content)
        else:
            known = {check.id for check in self.registry.checks}
            self.output.result(
                explanation_view(explained, name, known=known, width=self.output.width)
            )
        return int(ExitStatus.OK)

    def _open(self, word: str) -> BinaryIO:
        if word == "-":
            if os.isatty(0):
                self.output.note("reading the log from the terminal; end it with ^D")
            return os.fdopen(0, "rb", closefd=False)
        path = Path(self.environment.cwd, word)
        try:
            # Without it, a FIFO that nobody writes into would never open.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._unknown(word) from error
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{word} cannot be read: {reason}", hint=_LOG_HINT) from error
        mode = os.fstat(descriptor).st_mode
        is_device = stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not os.isatty(descriptor))
        if stat.S_ISDIR(mode) or is_device:
            os.close(descriptor)
            kind = "a device" if is_device else "a folder"
            raise ConfigError(f"{word} is {kind}, not a log", hint=_LOG_HINT)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")

    def _unknown(self, word: str) -> ConfigError:
        """Nothing of this name: a check that is mistyped, or a file that is missing."""
        if "/" in word or ("." in word and not _CHECK_ID.fullmatch(word)):
            return ConfigError(f"there is no file {word}", hint=_LOG_HINT)
        try:
            self.registry.expand(word)
        except ConfigError as error:
            return ConfigError(f"there is no check, group or file {word!r}", hint=error.hint)
        raise AssertionError(word)


def cause_lines(error: VcliError) -> tuple[str, ...]:
    """What the catalogue knows of a failure of our own processes, for people; often nothing."""
    if not isinstance(error, ReportedError):
        return ()
    report = error.report
    match = explain_text(f"{report.traceback}\n{report.kind}: {report.message}")
    if match is None:
        return ()
    check = match.symptom.check
    named = f" [{check}]" if check else ""
    lines = [f"  cause: {match.cause}{named}"]
    if match.remedy not in error.hint:
        lines.append(f"  → {match.remedy}")
    return tuple(lines)


def _text_chunks(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The log in chunks, without the empty blocks that truncation leaves at its begin.

    Raises:
        ConfigError: it is empty, is no text, or cannot be read.
    """
    is_first = True
    while True:
        try:
            chunk = stream.read(_CHUNK_BYTES)
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}", hint=_LOG_HINT) from error
        if not chunk:
            break
        if is_first:
            chunk = chunk.lstrip(b"\0")
            if not chunk:
                continue
            _refuse_binary(chunk, name)
            is_first = False
        yield chunk
    if is_first:
        raise ConfigError(f"{name} is empty", hint=_LOG_HINT)


def _refuse_binary(chunk: bytes, name: str) -> None:
    for magic, (what, hint) in _MAGIC.items():
        if chunk.startswith(magic):
            raise ConfigError(f"{name} is {what}, not a log", hint=hint.format(path=name))
    sample = chunk[:65536]
    if sample[:2] in _BOMS:
        return
    num_controls = len(sample) - len(sample.translate(None, _CONTROLS))
    if num_controls * 20 > len(sample):
        raise ConfigError(
            f"{name} is no text: {num_controls} of its first {len(sample)} bytes are control "
            "characters",
            hint=_LOG_HINT,
        )


def _check_json(check: Check) -> dict[str, object]:
    from inspect import cleandoc

    return {
        "id": check.id,
        "group": check.group,
        "level": check.level.value,
        "title": check.title,
        "looks_at": cleandoc(check.explanation),
        "expected": check.expected,
        "why": check.why,
        "remedy": check.remedy.bare_metal,
        "requires": list(check.requires),
    }
