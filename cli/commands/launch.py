"""`vcli launch`: one node of a deployment. The same code and flags as `serve`."""

import socket
import time
from dataclasses import fields, replace
from functools import wraps
from typing import Any, Final

import typer

from vcli.cli.commands.serve import serve
from vcli.cli.output import Output
from vcli.cli.scheduler_environ import FoundPlace, TypedPlace, find_place

LAUNCH_HELP: Final = """Run one node of a model over several: node 0 serves, the others follow.

Type it on every node with the same flags but --node-rank; the nodes wait for each other.
Without -n, -r and --master-addr, the variables of srun, LeaderWorkerSet or torchrun are taken.

Example:  vcli launch -n 2 -r 0 --master-addr 10.0.0.1 -tp 8 -pp 2 ./Qwen3-32B

With Slurm:  srun --ntasks-per-node=1 vcli launch -tp 8 -pp 2 ./Qwen3-32B
"""

#: How long a scheduler may take to make the name of node 0 known, and how often it is looked up.
NAME_WAIT_S: Final = 30.0
_LOOK_UP_EVERY_S: Final = 0.5


@wraps(serve)
def launch(context: typer.Context, **flags: Any) -> int:
    """Serve as the node that the flags name, or else the variables of a scheduler."""
    output = Output(context.obj, json_mode=flags["as_json"])
    place = take_place(context, output)
    if "master_addr" in place.values and not flags["dry_run"]:
        _wait_until_known(str(place.values["master_addr"]), output)
    # The lines for other nodes are made of what was typed: they hold outside of the scheduler too.
    command, *others = context.obj.argv
    context.obj = replace(context.obj, argv=(command, *place.words(), *others))
    return serve(context, **{**flags, **place.values})


def take_place(context: typer.Context, output: Output) -> FoundPlace:
    """What a scheduler's variables say beside the flags, put among the parameters and told."""
    place = find_place(_typed_place(context), context.obj.environ)
    if place.values:
        output.note(f"place  {place}")
    for conflict in place.conflicts:
        output.note(f"! {conflict} [ENV-05]")
    context.params.update(place.values)
    return place


def _wait_until_known(host: str, output: Output) -> None:
    """A pod may start before the name of the first one is in the DNS. What fails then says so."""
    until_s = time.monotonic() + NAME_WAIT_S
    is_told = False
    while not _is_known(host) and time.monotonic() < until_s:
        if not is_told:
            output.note(f"{host} does not resolve yet; asking again for {NAME_WAIT_S:.0f} s")
            is_told = True
        time.sleep(_LOOK_UP_EVERY_S)


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return False
    return True


def _typed_place(context: typer.Context) -> TypedPlace:
    typed: dict[str, Any] = {}
    for parameter in fields(TypedPlace):
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name != "DEFAULT":
            typed[parameter.name] = context.params[parameter.name]
    return TypedPlace(**typed)
