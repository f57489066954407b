"""The flags of `vcli doctor` alone; those that it shares with others stand in `options.py`."""

from typing import Annotated

import typer

_MODEL = "Model"
_SERVER = "HTTP server"
_FILES = "Files"

Checks = Annotated[
    list[str] | None,
    typer.Argument(
        help="Checks or groups to run (net, lim-02); all if left out. A path is taken as --model.",
        metavar="[CHECK]...",
        show_default=False,
    ),
]
DoctorModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model of the launch: a folder, a .gguf file, or a downloaded Hub name.",
        metavar="MODEL",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
DoctorPort = Annotated[
    int | None,
    typer.Option(
        "--port",
        help="Port of the launch; 8000 if left out, where a taken port is only a warning.",
        metavar="PORT",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
SkipChecks = Annotated[
    list[str] | None,
    typer.Option("--skip", help="Leave out a check or group; may be repeated.", metavar="CHECK"),
]
Strict = Annotated[bool, typer.Option("--strict", help="Count warnings as failures.")]
ListChecks = Annotated[
    bool, typer.Option("--list-checks", help="List the checks with their levels, run none.")
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Show every check, and the traceback of one that crashed."
    ),
]

SaveBaseline = Annotated[
    str | None,
    typer.Option(
        "--save-baseline",
        help="Keep this report as the good state, to compare with later.",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_FILES,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        help="Say what differs from a kept report.",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_FILES,
    ),
]
Bundle = Annotated[
    str | None,
    typer.Option(
        "--bundle",
        help="Write report, versions and system files for an issue, secrets removed: a .tgz or "
        ".tar.gz.",
        metavar="FILE.tgz",
        show_default=False,
        rich_help_panel=_FILES,
    ),
]
Fix = Annotated[
    bool,
    typer.Option(
        "--fix", help="Do harmless repairs first: left-over files of vcli, its cache folder."
    ),
]
Deep = Annotated[
    bool,
    typer.Option(
        "--deep",
        help="Measure beside whoever uses a GPU, try CPU processes, and look longer: minutes.",
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help="Start nothing on the GPUs: leave out the checks of level L3, by far slowest.",
    ),
]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Repeat every 5 seconds (--watch 30: every 30) and say what changed, until ^C; with "
        "--json a document on each line.",
    ),
]
Html = Annotated[
    str | None,
    typer.Option(
        "--html",
        help="Write the report as one page that needs nothing else, secrets removed.",
        metavar="FILE.html",
        show_default=False,
        rich_help_panel=_FILES,
    ),
]
RunningInstance = Annotated[
    str | None,
    typer.Option(
        "--instance",
        help="Show a running instance: processes, ranks, who waits for whom, stacks.",
        metavar="PID|latest",
        show_default=False,
    ),
]
DoctorSaveFacts = Annotated[
    str | None,
    typer.Option(
        "--save-facts",
        help="Write what was seen of this machine, for vcli topo --facts elsewhere.",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_FILES,
    ),
]
