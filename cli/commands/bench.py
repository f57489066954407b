"""`vcli bench`: the group, and `ipc`, what the queue between the processes here can do."""

from contextlib import closing
from typing import Annotated

import typer

from vcli.cli.commands.bench_offline import offline
from vcli.cli.commands.bench_serve import bench_serve
from vcli.cli.help_text import HelpCommand, HelpGroup
from vcli.cli.options import AsJson
from vcli.cli.output import Output
from vcli.topology import ConfigError, ExitStatus, VcliError

SCHEMA = "vcli.bench.ipc/1"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

bench_app = typer.Typer(
    help="Measure parts of vcli on this machine.", cls=HelpGroup, no_args_is_help=True
)


@bench_app.callback()
def _group() -> None:
    """Measure parts of vcli on this machine."""


@bench_app.command(cls=HelpCommand)
def ipc(
    context: typer.Context,
    readers: Annotated[
        str, typer.Option("--readers", help="Numbers of reader processes, each is measured.")
    ] = "1,2,4,8",
    payload: Annotated[
        str, typer.Option("--payload", help="Sizes of a message: bytes, or with K, M, G.")
    ] = "100,64K,8M",
    seconds: Annotated[
        float, typer.Option("--seconds", help="Time for each figure of a row; a row has four.")
    ] = 0.5,
    pace_ms: Annotated[
        float, typer.Option("--pace-ms", help="Pause between messages for latency and CPU.")
    ] = 2.0,
    kills: Annotated[
        int, typer.Option("--kills", help="How often a reader, and a writer, is killed; 0: never.")
    ] = 10,
    as_json: AsJson = False,
) -> int:
    """Measure the queue to the workers: latency, throughput, CPU, how soon a death is known.

    Ctrl-C ends it and prints what is known.

    Example:  vcli bench ipc --readers 1,8 --payload 100,1M --json
    """
    # Here, so that no other command loads the queue for it.
    from vcli.cli.views.bench import document, table
    from vcli.runtime.bench.ipc import IpcBenchRow, IpcBenchSpec, run_ipc_bench
    from vcli.runtime.bench.ipc_deaths import DeathRow, run_death_bench
    from vcli.runtime.bench.stats import host_facts

    output = Output(context.obj, json_mode=as_json)
    spec = IpcBenchSpec(
        readers=tuple(_numbers("--readers", readers)),
        payloads_bytes=tuple(_numbers("--payload", payload)),
        seconds=seconds,
        gap_s=pace_ms / 1e3,
        kills=kills,
    )
    host = host_facts()
    rows: list[IpcBenchRow] = []
    deaths: list[DeathRow] = []
    status = ExitStatus.OK
    try:
        with closing(run_ipc_bench(spec)) as bench:
            for row in bench:
                rows.append(row)
                output.note(
                    f"{len(rows)} of {len(spec.readers) * len(spec.payloads_bytes)} measured"
                )
        with closing(run_death_bench(spec)) as bench_of_deaths:
            deaths.extend(bench_of_deaths)
    except KeyboardInterrupt:
        output.note("stopped: this is what is known")
        status = ExitStatus.INTERRUPTED
    except VcliError as error:
        if not rows:
            raise
        output.note_error(error)
        status = error.exit_status
    if as_json:
        output.document(SCHEMA, document(host, spec, rows, deaths), status)
    else:
        output.result(table(host, rows, deaths, width=output.width))
    return int(status)


bench_app.command("offline", cls=HelpCommand)(offline)
bench_app.command("serve", cls=HelpCommand)(bench_serve)


def _numbers(flag: str, text: str) -> list[int]:
    """`100,64K,8M` in bytes.

    Raises:
        ConfigError: something in it is no number.
    """
    numbers = []
    for word in text.split(","):
        digits = word.strip().upper().removesuffix("B").removesuffix("I")
        unit = _UNITS.get(digits[-1:], 1)
        digits = digits if unit == 1 else digits[:-1]
        if not digits.isascii() or not digits.isdigit():
            raise ConfigError(f"{flag} {text}: {word!r} is no number", hint=f"{flag} 1,2,4")
        numbers.append(int(digits) * unit)
    return numbers
