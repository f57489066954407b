"""`vcli serve`: a model behind OpenAI's API."""

import typer

from vcli.cli import options
from vcli.cli.build import ModelSettings, parse_bytes, parse_partition, refuse_unserved_sizes
from vcli.cli.output import Output
from vcli.cli.serve_session import ServeSession
from vcli.runtime.config import CacheConfig, SchedulerConfig
from vcli.topology import ParallelConfig

_CACHE = CacheConfig()
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
    distributed_executor_backend: options.ExecutorBackend = None,
    start_method: options.StartMethod = None,
    pp_layer_partition: options.LayerPartition = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    served_model_name: options.ServedModelName = None,
    revision: options.Revision = None,
    load_format: options.LoadFormat = "safetensors",
    seed: options.Seed = 0,
    device: options.Device = "auto",
    kv_cache_memory: options.KvCacheMemory = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = _CACHE.gpu_memory_utilization,
    block_size: options.BlockSize = _CACHE.block_size,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    max_num_seqs: options.MaxNumSeqs = _SCHEDULER.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = _SCHEDULER.max_num_batched_tokens,
    enable_chunked_prefill: options.EnableChunkedPrefill = True,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    start_timeout: options.StartTimeout = 600.0,
    no_preflight: options.NoPreflight = False,
    dry_run: options.DryRun = False,
    worker_extension_cls: options.WorkerExtension = None,
    enforce_eager: options.EnforceEager = False,
    log_level: options.LogLevel = "WARNING",
    as_json: options.AsJson = False,
) -> int:
    """Serve a model through OpenAI's API; without a model, the embedded demo.

    Example:  vcli serve   |   vcli serve ./Qwen3-8B -tp 2 --port 8001
    """
    settings = ModelSettings(
        dtype=dtype,
        max_model_len=max_model_len,
        served_name=served_model_name,
        load_format=load_format,
        seed=seed,
        device=device,
        enforce_eager=enforce_eager,
        worker_extension_cls=worker_extension_cls,
        start_timeout_s=start_timeout,
        log_level=log_level.upper(),
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory_bytes=parse_bytes("--kv-cache-memory", kv_cache_memory),
            gpu_memory_utilization=gpu_memory_utilization,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        ),
    )
    parallel = ParallelConfig(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        prefill_context_parallel_size=prefill_context_parallel_size,
        decode_context_parallel_size=decode_context_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        is_moe=enable_expert_parallel,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        distributed_executor_backend=distributed_executor_backend,
        start_method=start_method,
        pp_layer_partition=parse_partition(pp_layer_partition),
    )
    refuse_unserved_sizes(parallel)
    session = ServeSession(
        environment=context.obj,
        output=Output(context.obj, json_mode=as_json),
        settings=settings,
        parallel=parallel,
        has_preflight=not no_preflight,
    )
    if dry_run:
        return session.show_plan(model, revision=revision)
    return session.run(model, revision=revision, host=host, port=port)
