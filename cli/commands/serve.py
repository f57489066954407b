"""`vcli serve`: a model behind OpenAI's API."""

import typer

from vcli.cli import options
from vcli.cli.build import refuse_unserved_sizes
from vcli.cli.device_ids import DeviceIds
from vcli.cli.named_code import refuse_impossible_engine
from vcli.cli.node_session import NodeSession
from vcli.cli.output import Output
from vcli.cli.serve_session import ServeSession
from vcli.cli.settings import model_settings, parallel_config
from vcli.runtime.config import CacheConfig, DeadlineConfig, SchedulerConfig
from vcli.topology import ExitStatus

_CACHE = CacheConfig()
_DEADLINES = DeadlineConfig()
_SCHEDULER = SchedulerConfig()


def serve(
    context: typer.Context,
    model: options.Model = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    pipeline_parallel_size: options.PipelineParallelSize = 1,
    data_parallel_size: options.DataParallelSize = 1,
    prefill_context_parallel_size: options.PrefillContextParallelSize = 1,
    decode_context_parallel_size: options.DecodeContextParallelSize = 1,
    enable_expert_parallel: options.EnableExpertParallel = False,
    nnodes: options.Nnodes = 1,
    node_rank: options.NodeRank = 0,
    master_addr: options.MasterAddr = "127.0.0.1",
    master_port: options.MasterPort = 29501,
    job_token_file: options.JobTokenFile = None,
    join_timeout: options.JoinTimeout = 300.0,
    distributed_executor_backend: options.ExecutorBackend = None,
    start_method: options.StartMethod = None,
    numa_bind: options.NumaBind = False,
    pp_layer_partition: options.LayerPartition = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    served_model_name: options.ServedModelName = None,
    revision: options.Revision = None,
    load_format: options.LoadFormat = "safetensors",
    seed: options.Seed = 0,
    device: options.Device = "auto",
    device_ids: DeviceIds = None,
    attention_backend: options.AttentionBackend = "auto",
    kv_cache_memory: options.KvCacheMemory = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = _CACHE.gpu_memory_utilization,
    block_size: options.BlockSize = _CACHE.block_size,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    max_num_seqs: options.MaxNumSeqs = _SCHEDULER.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = _SCHEDULER.max_num_batched_tokens,
    enable_chunked_prefill: options.EnableChunkedPrefill = True,
    async_scheduling: options.AsyncScheduling = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    start_timeout: options.StartTimeout = _DEADLINES.start_s,
    execute_model_timeout: options.ExecuteModelTimeout = _DEADLINES.execute_model_s,
    stall_timeout: options.StallTimeout = _DEADLINES.stall_s,
    shutdown_timeout: options.ShutdownTimeout = _DEADLINES.drain_s,
    no_preflight: options.NoPreflight = False,
    dry_run: options.DryRun = False,
    worker_extension_cls: options.WorkerExtension = None,
    enforce_eager: options.EnforceEager = False,
    timeline: options.Timeline = False,
    log_level: options.LogLevel = "WARNING",
    as_json: options.AsJson = False,
) -> int:
    """Serve a model through OpenAI's API; without a model, the embedded demo.

    Example:  vcli serve   |   vcli serve ./Qwen3-8B -tp 2 --port 8001
    """
    settings = model_settings(context.params)
    parallel = parallel_config(context.params)
    refuse_unserved_sizes(parallel)
    refuse_impossible_engine(settings, parallel)
    output = Output(context.obj, json_mode=as_json)
    session = ServeSession(
        environment=context.obj,
        output=output,
        settings=settings,
        parallel=parallel,
        has_preflight=not no_preflight,
        has_timeline=timeline,
        nodes=NodeSession(
            environment=context.obj,
            output=output,
            job_token_file=job_token_file,
            join_timeout_s=join_timeout,
        ),
    )
    if dry_run:
        return session.show_plan(model, revision=revision, port=port)
    status = ExitStatus(session.run(model, revision=revision, host=host, port=port))
    if as_json:
        output.document("vcli.serve/1", {"ended": status.name.lower()}, status)
    return int(status)
