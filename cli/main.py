"""The `vcli` command: composition and the one error boundary."""

import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from vcli.cli.commands.bench import bench_app
from vcli.cli.commands.doctor import doctor
from vcli.cli.commands.explain import explain
from vcli.cli.commands.launch import LAUNCH_HELP, launch
from vcli.cli.commands.serve import serve
from vcli.cli.commands.topo import topo
from vcli.cli.commands.version import show_version, version
from vcli.cli.environment import Environment, silence
from vcli.cli.errors import explain_crash, explain_usage_error
from vcli.cli.help_text import HelpCommand, HelpGroup
from vcli.cli.output import Output, lost_output
from vcli.topology import ExitStatus, VcliError

_SHORT_WITH_EQUALS = re.compile(r"^(-[A-Za-z])=(.*)$", re.DOTALL)

app = typer.Typer(
    name="vcli",
    cls=HelpGroup,
    help="Launch and diagnose multi-process, multi-GPU, multi-node LLM inference.",
    epilog="Start here:  vcli serve   |   vcli topo -tp 2 -pp 4",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["--help", "-h"],
        "max_content_width": 100,
    },
)


@app.callback()
def _global_options(
    context: typer.Context,
    is_version: Annotated[
        bool, typer.Option("--version", "-V", help="Show vcli's version and leave.", is_eager=True)
    ] = False,
) -> None:
    if is_version:
        show_version(context)
        raise typer.Exit


app.command(cls=HelpCommand)(serve)
app.command("launch", cls=HelpCommand, help=LAUNCH_HELP)(launch)
app.command(cls=HelpCommand)(topo)
app.command(cls=HelpCommand)(doctor)
app.command(cls=HelpCommand)(explain)
app.add_typer(bench_app, name="bench")
app.command(cls=HelpCommand)(version)


def main(environment: Environment) -> int:
    """Run one command; returns the exit status and never raises for what a user can cause."""
    argv = _normalize(environment.argv)
    json_mode = "--json" in argv
    output = Output(environment, json_mode=json_mode)
    try:
        returned = app(args=list(argv), obj=environment, standalone_mode=False, prog_name="vcli")
        return int(returned) if isinstance(returned, int) else int(ExitStatus.OK)
    except typer.exceptions.TyperException as error:
        return _report_usage(error, argv, output)
    except (typer.Abort, KeyboardInterrupt):
        return int(ExitStatus.INTERRUPTED)
    except VcliError as error:
        output.error(error)
        _tell_cause(error, output)
        return int(error.exit_status)
    except (BrokenPipeError, SystemExit) as error:
        # What prints the help makes the second of the first, with status 1.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        silence(environment.stdout)
        return int(ExitStatus.OK)
    except Exception as error:  # noqa: BLE001 - the border: a bug becomes one message and exit 7
        if environment.is_debug:
            output.note("".join(traceback.format_exception(error)).rstrip(), hang=None)
        crash = explain_crash(error)
        output.error(crash)
        return int(crash.exit_status)


def run() -> None:
    """The console script."""
    environment = Environment.of_this_process()
    status = main(environment)
    sys.exit(_flush(environment, status))


def known_flags(argv: Sequence[str]) -> list[str]:
    """Flags of the command that `argv` names, as typed (`-tp`, `--port`)."""
    chosen: Any = typer.main.get_command(app)
    for word in argv:
        # Commands stand in groups: `bench ipc`.
        chosen = getattr(chosen, "commands", {}).get(word, chosen)
    flags: list[str] = []
    for parameter in chosen.params:
        if parameter.param_type_name == "option":
            flags += [*parameter.opts, *parameter.secondary_opts]
    return flags


def _report_usage(
    error: typer.exceptions.TyperException, argv: Sequence[str], output: Output
) -> int:
    if error.format_message().strip():  # empty: help was printed because nothing was typed
        output.error(explain_usage_error(error, argv, known_flags(argv)))
    return int(ExitStatus.USAGE)


def _tell_cause(error: VcliError, output: Output) -> None:
    """What is known of such failures, where one of our processes failed."""
    from vcli.cli.explain import cause_lines

    for line in cause_lines(error):
        output.note(line)


def _normalize(argv: Sequence[str]) -> tuple[str, ...]:
    """Accept `-n=2`, which the parser would take for the value `=2`; after `--` nothing changes."""
    normal: list[str] = []
    for position, token in enumerate(argv):
        if token == "--":
            normal += argv[position:]
            break
        match = _SHORT_WITH_EQUALS.match(token)
        normal += [match[1], match[2]] if match else [token]
    return tuple(normal)


def _flush(environment: Environment, status: int) -> int:
    """Write what still waits in the buffers; the exit status, which a lost result changes."""
    try:
        environment.stdout.flush()
    except BrokenPipeError:
        silence(environment.stdout)
    except OSError as error:
        silence(environment.stdout)
        lost = lost_output(error)
        if status == ExitStatus.OK:
            Output(environment).error(lost)
            status = int(lost.exit_status)
    try:
        environment.stderr.flush()
    except OSError:
        silence(environment.stderr)
    return status
