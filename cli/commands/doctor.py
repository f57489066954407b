"""`vcli doctor`: is this machine fit, and what to type if it is not."""

import typer

from vcli.cli import doctor_options, options
from vcli.cli.commands.launch import take_place
from vcli.cli.device_ids import DeviceIds
from vcli.cli.doctor_facts import DoctorRequest, split_words
from vcli.cli.doctor_instance import InstanceSession, refuse_with_instance
from vcli.cli.doctor_session import DoctorFiles, DoctorSession, show_list
from vcli.cli.doctor_watch import take_seconds
from vcli.cli.output import Output
from vcli.cli.runtime_checks import registry
from vcli.cli.settings import parallel_config
from vcli.topology import ConfigError


def doctor(
    context: typer.Context,
    checks: doctor_options.Checks = None,
    model: doctor_options.DoctorModel = None,
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
    numa_bind: options.NumaBind = False,
    pp_layer_partition: options.LayerPartition = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_ids: DeviceIds = None,
    host: options.Host = "127.0.0.1",
    port: doctor_options.DoctorPort = None,
    skip: doctor_options.SkipChecks = None,
    strict: doctor_options.Strict = False,
    list_checks: doctor_options.ListChecks = False,
    verbose: doctor_options.Verbose = False,
    fix: doctor_options.Fix = False,
    save_facts: doctor_options.DoctorSaveFacts = None,
    save_baseline: doctor_options.SaveBaseline = None,
    baseline: doctor_options.Baseline = None,
    bundle: doctor_options.Bundle = None,
    html: doctor_options.Html = None,
    deep: doctor_options.Deep = False,
    fast: doctor_options.Fast = False,
    watch: doctor_options.Watch = False,
    instance: doctor_options.RunningInstance = None,
    as_json: options.AsJson = False,
) -> int:
    """Check this machine for a launch; prints what to type where something is wrong.

    With several ranks the variables of srun, LeaderWorkerSet or torchrun say which node this is,
    as for vcli launch.

    Example:  vcli doctor   |   vcli doctor --model ./Qwen3-8B -tp 2   |   vcli doctor net lim-02 -v
    """
    output = Output(context.obj, json_mode=as_json)
    if instance is not None:
        refuse_with_instance(context.params)
        return InstanceSession(environment=context.obj, output=output, is_verbose=verbose).run(
            instance
        )
    if deep and fast:
        raise ConfigError("--fast and --deep contradict each other", hint="leave one of them out")
    all_checks = registry()
    words, interval_s = take_seconds(checks or ()) if watch else (list(checks or ()), 0.0)
    names, named_model = split_words(words, is_known=all_checks.has, cwd=context.obj.cwd)
    # Watching repeats what is quick, unless it is asked for more.
    is_fast = (fast or (watch and not deep)) and not list_checks
    selected = all_checks.select(names, is_fast=is_fast)
    skip_ids = [id_ for word in skip or () for id_ in all_checks.expand(word)]
    if list_checks:
        return show_list(output, selected)
    ranks = tensor_parallel_size * pipeline_parallel_size
    if ranks * data_parallel_size * prefill_context_parallel_size > 1:
        # One rank is no launch over nodes: then only this machine is looked at.
        take_place(context, output)
    parallel = parallel_config(context.params)
    session = DoctorSession(
        environment=context.obj,
        output=output,
        registry=all_checks,
        selected=selected,
        skip_ids=tuple(skip_ids),
        is_strict=strict,
        is_verbose=verbose,
        files=DoctorFiles(
            save_facts=save_facts,
            save_baseline=save_baseline,
            baseline=baseline,
            bundle=bundle,
            html=html,
        ),
        does_fix=fix,
        is_deep=deep,
    )
    request = DoctorRequest(
        model=model or named_model,
        dtype=dtype,
        device=device,
        device_ids=device_ids,
        port=port,
        host=host,
    )
    if watch:
        return session.watch(request, parallel, interval_s=interval_s)
    return session.run(request, parallel)
