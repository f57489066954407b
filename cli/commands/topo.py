"""`vcli topo`: the plan of a launch, before anything starts."""

import json
from pathlib import Path

import typer

from vcli.cli import options
from vcli.cli.build import parse_partition, resolve_device, resolve_dtype
from vcli.cli.output import Output
from vcli.cli.views.layout import layout_view
from vcli.diagnostics import collect_host_facts
from vcli.topology import (
    ConfigError,
    ModelSpec,
    ParallelConfig,
    check_model_fits,
    model_spec_from_config,
    plan_to_json,
    plan_topology,
)


def topo(
    context: typer.Context,
    model: options.TopoModel = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    pipeline_parallel_size: options.PipelineParallelSize = 1,
    data_parallel_size: options.DataParallelSize = 1,
    prefill_context_parallel_size: options.PrefillContextParallelSize = 1,
    decode_context_parallel_size: options.DecodeContextParallelSize = 1,
    enable_expert_parallel: options.EnableExpertParallel = False,
    enable_eplb: options.EnableEplb = False,
    moe: options.AssumeMoe = False,
    nnodes: options.Nnodes = 1,
    node_rank: options.NodeRank = 0,
    master_addr: options.MasterAddr = "127.0.0.1",
    master_port: options.MasterPort = 29501,
    distributed_executor_backend: options.ExecutorBackend = None,
    start_method: options.StartMethod = None,
    pp_layer_partition: options.LayerPartition = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Show every rank, group, process, byte and decision of a launch; starts nothing.

    Example:  vcli topo -tp 2 -pp 4   |   vcli topo ./Qwen3-8B -tp 4 --json
    """
    output = Output(context.obj, json_mode=as_json)
    spec = _read_spec(model) if model else None
    parallel = ParallelConfig(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        prefill_context_parallel_size=prefill_context_parallel_size,
        decode_context_parallel_size=decode_context_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        enable_eplb=enable_eplb,
        is_moe=moe or enable_expert_parallel or (spec is not None and spec.is_moe),
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        distributed_executor_backend=distributed_executor_backend,
        start_method=start_method,
        pp_layer_partition=parse_partition(pp_layer_partition),
    )
    if spec is not None:
        check_model_fits(spec, parallel)
    plan = plan_topology(
        parallel,
        host=collect_host_facts(),
        model=spec,
        dtype=resolve_dtype(dtype, spec) if spec else None,
        device_type=resolve_device(device),
    )
    if as_json:
        document = plan_to_json(plan)
        output.document(document.pop("schema"), document)
    else:
        output.result(layout_view(plan, width=output.width))


def _read_spec(model: str) -> ModelSpec:
    """The shape in a local folder's config.json; no weight is touched."""
    path = Path(model)
    config_path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(config_path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{config_path} does not exist",
            hint="topo reads the config.json of a local model folder; without a model it plans "
            "the sizes alone",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config_path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{config_path} is no valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{config_path} holds no JSON object")
    return model_spec_from_config(config, source=str(config_path))
