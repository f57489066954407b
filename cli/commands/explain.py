"""`vcli explain`: a check, or the first cause in a log."""

from typing import Annotated

import typer

from vcli.cli import options
from vcli.cli.output import Output
from vcli.cli.runtime_checks import registry

What = Annotated[
    str,
    typer.Argument(
        help="A check (LIM-03), a group of checks (lim), a log file, or - for a log on stdin.",
        metavar="CHECK|FILE|-",
        show_default=False,
    ),
]


def explain(context: typer.Context, what: What, as_json: options.AsJson = False) -> int:
    """Say what a check is about, or what went wrong first in a log of vcli, vLLM, SGLang, Ray...

    Example:  vcli explain lim-03   |   vcli explain serve.log   |   kubectl logs p | vcli explain -
    """
    from vcli.cli.explain import ExplainSession

    session = ExplainSession(
        environment=context.obj,
        output=Output(context.obj, json_mode=as_json),
        registry=registry(),
    )
    return session.run(what)
