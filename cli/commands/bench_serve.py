"""`vcli bench serve`: load on a running OpenAI-compatible server."""

import math
from typing import Annotated

import typer

from vcli.cli.options import AsJson
from vcli.cli.output import Output


def bench_serve(
    context: typer.Context,
    base_url: Annotated[
        str, typer.Option(help="Where the server is, with or without /v1.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to ask; the first one that the server names if left out.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[
        str, typer.Option(help="completions or chat.", metavar="NAME")
    ] = "completions",
    num_prompts: Annotated[int, typer.Option(help="Requests to send.", metavar="N")] = 100,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests a second on average, at random times (Poisson); inf: all at once.",
            metavar="RATE",
        ),
    ] = math.inf,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Most requests at a time; others wait, which counts for none of the times.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    input_len: Annotated[
        int,
        typer.Option(
            help="Tokens of each prompt: random ids where the server takes them, else words.",
            metavar="TOKENS",
        ),
    ] = 512,
    output_len: Annotated[
        int, typer.Option(help="Tokens to generate for each.", metavar="TOKENS")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", metavar="T")] = 0.0,
    vocab_size: Annotated[
        int, typer.Option(help="Random token ids are below this.", metavar="N")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of prompts and times.", metavar="N")] = 0,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds until a request counts as failed.", metavar="SECONDS")
    ] = 600.0,
    save: Annotated[
        str | None,
        typer.Option(
            help="Also write the JSON document, with every request, to FILE.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Measure a running server by streamed requests; each figure is over successful ones.

    TTFT: from sending a request to the first piece of its answer.
    TPOT: from the first to the last piece, by the tokens after the first.
    ITL: between two pieces, which may hold several tokens.
    E2E: to the end of the answer. Tokens are counted by the server's `usage`.

    OPENAI_API_KEY is sent where it is set. Ctrl-C prints what is known.
    Exit 1: some requests failed; 6: the server went away.

    Example:  vcli bench serve --num-prompts 200 --request-rate 4 --save day1.json
    """
    from vcli.cli.bench_serve_session import BenchServeSession
    from vcli.runtime.bench.http_client import parse_base_url
    from vcli.runtime.bench.serve_spec import ServeBenchSpec

    spec = ServeBenchSpec(
        endpoint=endpoint,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        request_timeout_s=request_timeout,
        temperature=temperature,
        vocab_size=vocab_size,
        seed=seed,
    )
    session = BenchServeSession(
        environment=context.obj,
        output=Output(context.obj, json_mode=as_json),
        spec=spec,
        address=parse_base_url(base_url),
        model=model,
        save=save,
    )
    return int(session.run())
