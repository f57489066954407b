"""`vcli bench offline`: the engine's speed without HTTP and without text."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from vcli.cli import options
from vcli.cli.build import refuse_unserved_sizes
from vcli.cli.commands.serve import serve
from vcli.cli.named_code import refuse_impossible_engine
from vcli.cli.output import Output
from vcli.cli.settings import model_settings, parallel_config

#: Flags of `serve` that mean nothing here: HTTP, other nodes, what a benchmark decides itself.
_LEFT_OUT: Final = frozenset(
    {
        "host",
        "port",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "job_token_file",
        "join_timeout",
        "served_model_name",
        "enable_prefix_caching",
        "worker_extension_cls",
        "dry_run",
        "timeline",
        "shutdown_timeout",
    }
)
_WHAT: Final = "Workload"


def _with_engine_flags(command: Callable[..., int]) -> Callable[..., int]:
    """`command` with the flags of `serve` that start an engine, behind its own."""
    own = inspect.signature(command).parameters
    named = [each for each in own.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [
        each
        for name, each in inspect.signature(serve).parameters.items()
        if name not in own and name not in _LEFT_OUT
    ]
    parameters = [*named, *shared]

    def with_flags(**values: Any) -> int:
        return command(**values)

    with_flags.__doc__ = command.__doc__
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_flags


def _serve_defaults() -> Mapping[str, Any]:
    """What flags that are left out stand for."""
    parameters = inspect.signature(serve).parameters.items()
    return {name: each.default for name, each in parameters if name in _LEFT_OUT}


@_with_engine_flags
def offline(
    context: typer.Context,
    model: options.Model = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Measure a well-known shape with random weights instead of a model: llama8b, "
            "qwen06b or qwen30b_moe.",
            metavar="NAME",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="one-stream (128 tokens in, 256 out), batch32 (32 of 512 in, 256 out), mixed256 "
            "(256 of 100-1024 in and out, temperature 0.6), or all, which is meant if left out.",
            metavar="NAME",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Instead of --workload: so many equal requests at once.",
            metavar="N",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each prompt of --num-prompts; 512 if left out.",
            metavar="TOKENS",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens generated for each of --num-prompts; 128 if left out.",
            metavar="TOKENS",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            help="Runs of each workload; the best one is shown, --json has all.",
            metavar="N",
            rich_help_panel=_WHAT,
        ),
    ] = 2,
    rpc_calls: Annotated[
        int,
        typer.Option(
            help="Also time so many calls of nothing: front end, core, all ranks and back.",
            metavar="N",
            rich_help_panel=_WHAT,
        ),
    ] = 0,
    memory_bandwidth: Annotated[
        float | None,
        typer.Option(
            help="GB/s of one device's memory, for the bytes floor; measured by a copy if left "
            "out.",
            metavar="GB/S",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            help="Peak TFLOP/s of one device, for the op floor; no op floor if left out.",
            metavar="TFLOPS",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    as_json: options.AsJson = False,
    **engine: Any,
) -> int:
    """Measure the engine: token ids in, token ids out, without HTTP, tokenizer and prefix cache.

    TTFT: from a request to its first token, as the front end sees it.
    ITL: between two tokens of a request.
    Floors: weights and KV cache read once per step; two operations per parameter.
    Ctrl-C ends it and prints what is known.

    Example:  vcli bench offline --shape llama8b --workload one-stream --json
    """
    from vcli.cli.bench_offline_session import BenchOfflineSession, OfflineAsked
    from vcli.cli.engine_setup import EngineSetup

    values = {**_serve_defaults(), **context.params, "enable_prefix_caching": False}
    if shape is not None:
        values["load_format"] = "dummy"
    asked = OfflineAsked(
        model=model,
        revision=engine["revision"],
        shape=shape,
        workload=workload,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        repeat=repeat,
        rpc_calls=rpc_calls,
        memory_bandwidth=memory_bandwidth,
        peak_tflops=peak_tflops,
    )
    parallel = parallel_config(values)
    refuse_unserved_sizes(parallel)
    settings = model_settings(values)
    refuse_impossible_engine(settings, parallel)
    setup = EngineSetup(
        environment=context.obj,
        output=Output(context.obj, json_mode=as_json),
        settings=settings,
        parallel=parallel,
        has_preflight=not engine["no_preflight"],
    )
    return int(BenchOfflineSession(setup=setup, asked=asked).run())
