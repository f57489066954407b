"""`--help` by words: flags are never cut, and examples stand as they are typed.

Tables with borders cut `--distributed-executor-backend` in a terminal of 80 columns.
"""

import inspect
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

_FLAG_COLUMNS: Final = 26
_EXAMPLES_APART: Final = "   |   "


class _HelpText:
    """Writes paragraphs by words; one with `Label:  command` keeps its lines."""

    help: str | None
    epilog: str | None

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The help of the command."""
        del ctx
        with formatter.indentation():
            for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
                _write_paragraph(paragraph, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """What stands at the end."""
        del ctx
        if self.epilog:
            _write_paragraph(self.epilog, formatter)


class HelpCommand(_HelpText, TyperCommand):
    """A command whose flags stand under the headings of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and flags, each with its help behind or beneath it."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_flag = parameter.param_type_name == "option"
            usual = "Options" if is_flag else "Arguments"
            panel = getattr(parameter, "rich_help_panel", None) or usual
            panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records, col_max=_FLAG_COLUMNS)


class HelpGroup(_HelpText, TyperGroup):
    """A group whose commands have the whole first paragraph of their help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """All commands of the group."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                text = inspect.cleandoc(command.help or "").split("\n\n")[0]
                rows.append((name, text.replace("\n", " ")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _write_paragraph(paragraph: str, formatter: Any) -> None:
    formatter.write_paragraph()
    label, gap, commands = paragraph.partition(":  ")
    if not gap:
        formatter.write_text(paragraph)
        return
    lead = f"{label}:  "
    for command in commands.split(_EXAMPLES_APART):
        formatter.write(f"{'':{formatter.current_indent}}{lead}{command}\n")
        lead = " " * len(lead)
