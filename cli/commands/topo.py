"""`vcli topo`: the plan of a launch, before anything starts."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import typer

from vcli.cli import options, topo_options
from vcli.cli.build import parse_partition
from vcli.cli.device_ids import DeviceIds
from vcli.cli.views.layout import layout_view
from vcli.topology import ConfigError
from vcli.topology.sizes import ParallelSizes


def topo(
    context: typer.Context,
    model: options.TopoModel = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    pipeline_parallel_size: options.PipelineParallelSize = 1,
    data_parallel_size: options.DataParallelSize = 1,
    prefill_context_parallel_size: options.PrefillContextParallelSize = 1,
    decode_context_parallel_size: options.DecodeContextParallelSize = 1,
    data_parallel_size_local: topo_options.DataParallelSizeLocal = None,
    data_parallel_rank: topo_options.DataParallelRank = None,
    data_parallel_external_lb: topo_options.DataParallelExternalLb = False,
    data_parallel_hybrid_lb: topo_options.DataParallelHybridLb = False,
    data_parallel_backend: topo_options.DataParallelBackend = "mp",
    enable_expert_parallel: options.EnableExpertParallel = False,
    enable_eplb: options.EnableEplb = False,
    num_redundant_experts: topo_options.NumRedundantExperts = 0,
    moe: options.AssumeMoe = False,
    nnodes: options.Nnodes = 1,
    node_rank: options.NodeRank = 0,
    headless: topo_options.Headless = False,
    api_server_count: topo_options.ApiServerCount = None,
    master_addr: options.MasterAddr = "127.0.0.1",
    master_port: options.MasterPort = 29501,
    distributed_executor_backend: options.ExecutorBackend = None,
    start_method: options.StartMethod = None,
    pp_layer_partition: options.LayerPartition = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_ids: DeviceIds = None,
    attention_backend: options.AttentionBackend = "auto",
    max_model_len: options.MaxModelLen = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    block_size: options.BlockSize = 16,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 8192,
    facts: topo_options.FactsFiles = None,
    save_facts: topo_options.SaveFacts = None,
    gpus: topo_options.AssumedGpus = None,
    gpu: topo_options.AssumedGpu = None,
    link: topo_options.NetworkSpeed = None,
    suggest: topo_options.Suggest = False,
    compare: topo_options.Compare = None,
    batch: topo_options.BatchRequests = 32,
    context_tokens: topo_options.ContextTokens = 1024,
    rank: topo_options.ShowRank = None,
    group: topo_options.ShowGroup = None,
    explain: topo_options.Explain = None,
    format_name: topo_options.PlanFormat = "text",
    print_commands: topo_options.PrintCommands = False,
    hosts: topo_options.Hosts = None,
    hostfile: topo_options.HostFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Show every rank, group, process, byte and decision of a launch; starts nothing.

    Example:  vcli topo -tp 2 -pp 4   |   vcli topo ./Qwen3-8B --gpus 8 --gpu h200 --suggest
    """
    # Late, so that the other commands do not pay for it.
    from vcli.cli.topo_facts import FactsRequest
    from vcli.cli.topo_session import TopoSession, TopoShow
    from vcli.topology.estimate import Workload

    sizes = _sizes(context.params, is_moe=moe or enable_expert_parallel)
    TopoSession(
        environment=context.obj,
        sizes=sizes,
        model_name=model,
        dtype=dtype,
        attention_backend=attention_backend,
        max_model_len=max_model_len,
        machines=FactsRequest(
            device=device,
            device_ids=device_ids,
            facts=facts or (),
            gpus=gpus,
            gpu=gpu,
            link=link,
        ),
        workload=Workload(
            num_requests=batch,
            context_tokens=context_tokens,
            utilization=gpu_memory_utilization,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        text_view=layout_view,
    ).show(
        TopoShow(
            as_json=as_json,
            format_name=format_name,
            rank=rank,
            group=group,
            explain=explain,
            is_suggesting=suggest,
            compared=_compared(sizes, compare) if compare is not None else None,
            save_facts=save_facts,
            prints_commands=print_commands,
            hosts=hosts,
            hostfile=hostfile,
        )
    )


def _sizes(params: Mapping[str, Any], *, is_moe: bool) -> ParallelSizes:
    """What was typed, by the names of the fields; not checked yet."""
    fields = ParallelSizes.__dataclass_fields__
    typed = {name: value for name, value in params.items() if name in fields}
    typed["pp_layer_partition"] = parse_partition(params["pp_layer_partition"])
    return ParallelSizes(**typed, is_moe=is_moe)


def _compared(sizes: ParallelSizes, flags: str) -> ParallelSizes:
    """The deployment of `sizes` with the layout that `flags` name; sizes left out are 1.

    Raises:
        ConfigError: flags that topo does not have.
    """
    app = typer.Typer(
        add_completion=False,
        context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
    )
    app.command()(topo)
    command = typer.main.get_command(app)
    try:
        words = shlex.split(flags)
        if {"-h", "--help"} & set(words):
            raise ConfigError(f"--compare {flags!r}: no layout", hint='--compare "-tp 8"')
        other = command.make_context("--compare", words)
    except typer.exceptions.TyperException as error:
        raise ConfigError(
            f"--compare {flags!r}: {error.format_message()}", hint='--compare "-tp 8 -pp 2"'
        ) from error
    except ValueError as error:
        raise ConfigError(f"--compare {flags!r}: {error}", hint='--compare "-tp 8"') from error
    given = {
        name
        for name in other.params
        if (source := other.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    allowed = _LAYOUT_NAMES | {"nnodes", "pp_layer_partition", "enable_eplb"}
    wrong = sorted(given - allowed)
    if wrong:
        flag = "--" + wrong[0].replace("_", "-")
        raise ConfigError(
            f"--compare {flags!r}: {flag} is no size of a layout",
            hint="give it outside of --compare, where it holds for both plans",
        )
    typed = _sizes(other.params, is_moe=sizes.is_moe)
    kept = {name: getattr(typed, name) for name in _LAYOUT_NAMES}
    more = {name: getattr(typed, name) for name in given - _LAYOUT_NAMES}
    if not typed.enable_expert_parallel:
        kept["enable_expert_parallel"] = sizes.enable_expert_parallel
    return replace(sizes, **{**kept, "pp_layer_partition": None, **more})


_LAYOUT_NAMES = frozenset(
    (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "data_parallel_size",
        "data_parallel_size_local",
        "enable_expert_parallel",
    )
)
