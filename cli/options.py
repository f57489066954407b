"""Each flag once, as a type with its help; names as vLLM's where it has them."""

from typing import Annotated, Any

import typer

_PARALLEL = "Parallelism"
_MODEL = "Model"
_CACHE = "Memory and scheduling"
_SERVER = "HTTP server"
_START = "Start"


def _flag(panel: str, *names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _seconds(name: str, text: str) -> Any:
    return _flag(_START, name, text=text, metavar="SECONDS")


Model = Annotated[
    str | None,
    typer.Argument(
        help="A folder with config.json and safetensors, a .gguf file, or a name on the Hub "
        "(Qwen/Qwen3-0.6B). Without it: the embedded demo model, SmolLM2-135M-Instruct.",
        show_default=False,
    ),
]

TopoModel = Annotated[
    str | None,
    typer.Argument(
        help="A model folder or its config.json, for layers and bytes; without it the sizes alone.",
        show_default=False,
    ),
]

TensorParallelSize = Annotated[
    int,
    _flag(
        _PARALLEL,
        "--tensor-parallel-size",
        "--tp-size",
        "-tp",
        text="Ranks that share each layer.",
        metavar="N",
    ),
]
PipelineParallelSize = Annotated[
    int,
    _flag(
        _PARALLEL,
        "--pipeline-parallel-size",
        "--pp-size",
        "-pp",
        text="Stages that share the layers.",
        metavar="N",
    ),
]
PrefillContextParallelSize = Annotated[
    int,
    _flag(
        _PARALLEL,
        "--prefill-context-parallel-size",
        "-pcp",
        text="Ranks that share a prompt.",
        metavar="N",
    ),
]
DecodeContextParallelSize = Annotated[
    int,
    _flag(
        _PARALLEL,
        "--decode-context-parallel-size",
        "-dcp",
        text="Ranks that share a KV cache while decoding.",
        metavar="N",
    ),
]
DataParallelSize = Annotated[
    int,
    _flag(
        _PARALLEL,
        "--data-parallel-size",
        "--dp-size",
        "-dp",
        text="Replicas of the model.",
        metavar="N",
    ),
]
EnableExpertParallel = Annotated[
    bool,
    _flag(
        _PARALLEL, "--enable-expert-parallel", "-ep", text="Spread whole experts over the ranks."
    ),
]
AssumeMoe = Annotated[
    bool, _flag(_PARALLEL, "--moe", text="Plan for a mixture-of-experts model without naming one.")
]
EnableEplb = Annotated[
    bool, _flag(_PARALLEL, "--enable-eplb", text="Balance the experts by their load.")
]
Nnodes = Annotated[
    int, _flag(_PARALLEL, "--nnodes", "-n", text="Nodes of the deployment.", metavar="N")
]
NodeRank = Annotated[
    int, _flag(_PARALLEL, "--node-rank", "-r", text="Which node this is, from 0.", metavar="I")
]
MasterAddr = Annotated[
    str, _flag(_PARALLEL, "--master-addr", text="Address of node 0.", metavar="HOST")
]
MasterPort = Annotated[
    int, _flag(_PARALLEL, "--master-port", text="Port on node 0 for the ranks.", metavar="PORT")
]
JobTokenFile = Annotated[
    str | None,
    _flag(
        _PARALLEL,
        "--job-token-file",
        text="File with the secret that all nodes know; VCLI_JOB_TOKEN does the same.",
        metavar="FILE",
        show_default=False,
    ),
]
JoinTimeout = Annotated[
    float,
    _flag(
        _PARALLEL,
        "--join-timeout",
        text="Seconds until all nodes must have come.",
        metavar="SECONDS",
    ),
]
ExecutorBackend = Annotated[
    str | None,
    _flag(
        _PARALLEL,
        "--distributed-executor-backend",
        text="uni (in the engine core), mp (a process per rank), or decided by the plan.",
        metavar="NAME",
        show_default=False,
    ),
]
StartMethod = Annotated[
    str | None,
    _flag(
        _PARALLEL,
        "--start-method",
        text="How worker processes are started; decided by the plan if left out.",
        metavar="NAME",
        show_default=False,
    ),
]
NumaBind = Annotated[
    bool,
    _flag(
        _PARALLEL,
        "--numa-bind",
        text="Keep each worker's threads and memory on the NUMA node of its GPU.",
    ),
]
LayerPartition = Annotated[
    str | None,
    _flag(
        _PARALLEL,
        "--pp-layer-partition",
        text="Layers of each stage, like 8,8,7,7; even if left out.",
        metavar="A,B,...",
        show_default=False,
    ),
]

Dtype = Annotated[
    str,
    _flag(
        _MODEL,
        "--dtype",
        text="Type of weights and activations: auto (the checkpoint's), float32, bfloat16 or "
        "float16.",
        metavar="TYPE",
    ),
]
MaxModelLen = Annotated[
    int | None,
    _flag(
        _MODEL,
        "--max-model-len",
        text="Longest prompt plus answer in tokens; the model's if left out.",
        metavar="TOKENS",
        show_default=False,
    ),
]
ServedModelName = Annotated[
    str | None,
    _flag(
        _MODEL,
        "--served-model-name",
        text="Name of the model in the API.",
        metavar="NAME",
        show_default=False,
    ),
]
Revision = Annotated[
    str | None,
    _flag(
        _MODEL,
        "--revision",
        text="Branch, tag or commit on the Hub.",
        metavar="REV",
        show_default=False,
    ),
]
LoadFormat = Annotated[
    str,
    _flag(
        _MODEL,
        "--load-format",
        text="safetensors, or dummy for random weights without reading any.",
        metavar="FORMAT",
    ),
]
AttentionBackend = Annotated[
    str,
    _flag(
        _MODEL,
        "--attention-backend",
        text="Kernels of attention: auto (decided by the plan), torch, triton or flashinfer.",
        metavar="NAME",
    ),
]
Seed = Annotated[int, _flag(_MODEL, "--seed", text="Seed of unseeded sampling.", metavar="N")]
Device = Annotated[str, _flag(_MODEL, "--device", text="auto, cpu or cuda.", metavar="TYPE")]

KvCacheMemory = Annotated[
    str | None,
    _flag(
        _CACHE,
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        text="Size of the KV cache of each rank, like 2G or 512M; on a CPU a quarter of what is "
        "free if left out.",
        metavar="BYTES",
        show_default=False,
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    _flag(
        _CACHE,
        "--gpu-memory-utilization",
        text="Part of each GPU's memory to use.",
        metavar="PART",
    ),
]
BlockSize = Annotated[
    int, _flag(_CACHE, "--block-size", text="Tokens in a KV block.", metavar="TOKENS")
]
EnablePrefixCaching = Annotated[
    bool,
    _flag(
        _CACHE,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        text="Reuse the KV blocks of equal beginnings.",
    ),
]
MaxNumSeqs = Annotated[
    int, _flag(_CACHE, "--max-num-seqs", text="Requests in one step.", metavar="N")
]
MaxNumBatchedTokens = Annotated[
    int, _flag(_CACHE, "--max-num-batched-tokens", text="Tokens in one step.", metavar="N")
]
EnableChunkedPrefill = Annotated[
    bool,
    _flag(
        _CACHE,
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        text="Let a long prompt run in several steps beside other requests.",
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    _flag(
        _CACHE,
        "--async-scheduling/--no-async-scheduling",
        text="Prepare the next step while one runs; on where it is possible, if left out.",
        show_default=False,
    ),
]

Host = Annotated[
    str, _flag(_SERVER, "--host", text="Address to listen on; 0.0.0.0 for all.", metavar="HOST")
]
Port = Annotated[
    int, _flag(_SERVER, "--port", text="Port to listen on; 0 takes a free one.", metavar="PORT")
]

StartTimeout = Annotated[
    float, _seconds("--start-timeout", "Seconds until every rank must be ready.")
]
ExecuteModelTimeout = Annotated[
    float, _seconds("--execute-model-timeout", "Seconds that a step may take before the end.")
]
StallTimeout = Annotated[
    float, _seconds("--stall-timeout", "Seconds until a step, or a busy rank, counts as stuck.")
]
ShutdownTimeout = Annotated[
    float, _seconds("--shutdown-timeout", "Seconds for running requests after ^C or SIGTERM.")
]
NoPreflight = Annotated[
    bool,
    _flag(
        _START, "--no-preflight", text="Skip the checks of machine and weights before the start."
    ),
]
DryRun = Annotated[
    bool, _flag(_START, "--dry-run", text="Print the plan and its reasons, start nothing.")
]
WorkerExtension = Annotated[
    str | None,
    _flag(
        _START,
        "--worker-extension-cls",
        text="module.Class whose public methods every worker gets.",
        metavar="NAME",
        show_default=False,
    ),
]
Timeline = Annotated[
    bool,
    _flag(
        _START,
        "--timeline",
        text="When ready, and after the first token, print when each process reached which state.",
    ),
]
EnforceEager = Annotated[bool, _flag(_START, "--enforce-eager", text="Never capture CUDA graphs.")]
LogLevel = Annotated[
    str,
    _flag(
        _START, "--log-level", text="DEBUG, INFO, WARNING or ERROR, for all processes.", metavar="L"
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")
]
