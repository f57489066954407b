"""Each choice and the reasons that are printed with it."""

import pytest

from vcli.topology import (
    DEFAULT_START_METHOD,
    ConfigError,
    Decision,
    HostFacts,
    LinkFacts,
    ParallelConfig,
    ProcessFacts,
    RendezvousSpec,
    choose_backend,
    choose_rendezvous,
    decide_all_reduce,
    decide_attention_backend,
    decide_omp_num_threads,
    decide_start_method,
)
from vcli.topology.attention import AttentionBackendName


@pytest.mark.parametrize("requested", [None, "auto"])
def test_start_method_is_the_default_unless_asked(requested: str | None) -> None:
    decision = decide_start_method(ProcessFacts(), requested)

    assert decision.value == DEFAULT_START_METHOD
    assert decision.reasons[0].startswith("the default")


def test_fork_is_granted_to_a_process_with_nothing_alive() -> None:
    decision = decide_start_method(ProcessFacts(), "fork")

    assert decision.value == "fork"
    assert decision.reasons[0].startswith("asked for")


def test_fork_is_refused_with_every_reason() -> None:
    process = ProcessFacts(
        platform="darwin",
        in_ray_actor=True,
        numa_bind=True,
        cuda_initialized=True,
        cuda_initialized_by="bitsandbytes",
        xpu_initialized=True,
        is_wsl=True,
        has_libgomp_pool=True,
        num_threads=3,
    )

    decision = decide_start_method(process, "fork")

    assert decision.value == "spawn"
    words = ("asked for", "darwin", "Ray actor", "NUMA", "bitsandbytes", "XPU", "WSL", "libgomp")
    for word, reason in zip((*words, "3 threads"), decision.reasons, strict=True):
        assert word in reason


@pytest.mark.parametrize(
    ("process", "value"),
    [
        (ProcessFacts(), "forkserver"),
        (ProcessFacts(cuda_initialized=True, num_threads=9), "forkserver"),
        (ProcessFacts(platform="darwin"), "spawn"),
        (ProcessFacts(in_ray_actor=True), "spawn"),
    ],
)
def test_fork_server_needs_linux_and_no_ray_actor(process: ProcessFacts, value: str) -> None:
    assert decide_start_method(process, "forkserver").value == value


def test_unknown_start_method_lists_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        decide_start_method(ProcessFacts(), "thread")

    assert caught.value.hint == "--start-method: auto, spawn, fork, forkserver"


@pytest.mark.parametrize(
    ("config", "process", "value"),
    [
        (ParallelConfig(), ProcessFacts(), "uni"),
        (ParallelConfig(), ProcessFacts(in_ray_placement_group=True), "uni"),
        (ParallelConfig(tensor_parallel_size=2), ProcessFacts(), "mp"),
        (ParallelConfig(data_parallel_size=2), ProcessFacts(), "mp"),
        (ParallelConfig(tensor_parallel_size=2, nnodes=2), ProcessFacts(), "mp"),
        (
            ParallelConfig(tensor_parallel_size=2, nnodes=2),
            ProcessFacts(in_ray_placement_group=True),
            "mp",
        ),
        (
            ParallelConfig(tensor_parallel_size=2),
            ProcessFacts(in_ray_placement_group=True),
            "ray",
        ),
        (ParallelConfig(data_parallel_size=2, data_parallel_backend="ray"), ProcessFacts(), "ray"),
        (
            ParallelConfig(distributed_executor_backend="my.pkg.Executor"),
            ProcessFacts(),
            "my.pkg.Executor",
        ),
        (
            ParallelConfig(distributed_executor_backend="colocated", tensor_parallel_size=2),
            ProcessFacts(),
            "colocated",
        ),
    ],
)
def test_backend(config: ParallelConfig, process: ProcessFacts, value: str) -> None:
    decision = choose_backend(config, process)

    assert decision.value == value
    assert decision.reasons


@pytest.mark.parametrize("name", ["nccl", "my pkg.Executor", ".Executor", "a..b", ""])
def test_unknown_backend_lists_the_choices(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend(ParallelConfig(distributed_executor_backend=name))

    assert "uni, mp, colocated, ray, external_launcher" in caught.value.hint


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(distributed_executor_backend="uni", tensor_parallel_size=2),
        ParallelConfig(distributed_executor_backend="ray", tensor_parallel_size=2, nnodes=2),
        ParallelConfig(distributed_executor_backend="colocated", tensor_parallel_size=2, nnodes=2),
    ],
    ids=str,
)
def test_backend_that_cannot_do_the_sizes_is_refused(config: ParallelConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend(config)

    assert caught.value.hint == "--distributed-executor-backend mp"


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (ParallelConfig(tensor_parallel_size=8), RendezvousSpec(scheme="file")),
        (
            ParallelConfig(tensor_parallel_size=2, nnodes=2, master_addr="10.0.0.1"),
            RendezvousSpec(scheme="tcp", host="10.0.0.1", port=29501),
        ),
        (
            ParallelConfig(data_parallel_size=2, is_moe=True),
            RendezvousSpec(scheme="tcp", host="127.0.0.1"),
        ),
        (ParallelConfig(data_parallel_size=2), RendezvousSpec(scheme="file")),
        (ParallelConfig(data_parallel_size=2, nnodes=2), RendezvousSpec(scheme="file")),
        (
            ParallelConfig(data_parallel_size=2, tensor_parallel_size=2, nnodes=4),
            RendezvousSpec(scheme="tcp"),
        ),
        (
            ParallelConfig(
                distributed_executor_backend="external_launcher", tensor_parallel_size=2
            ),
            RendezvousSpec(scheme="env"),
        ),
    ],
    ids=str,
)
def test_rendezvous(config: ParallelConfig, spec: RendezvousSpec) -> None:
    decision = choose_rendezvous(config)

    assert decision.value == spec
    assert len(decision.reasons) == 1


def test_rendezvous_url_brackets_ipv6() -> None:
    assert RendezvousSpec(scheme="tcp", host="fd00::1", port=9).url == "tcp://[fd00::1]:9"
    assert RendezvousSpec(scheme="env").url == "env://"
    assert "published" in RendezvousSpec(scheme="tcp", host="h").url


def all_reduce(
    *,
    device_type: str = "cuda",
    size: int = 2,
    within: bool = True,
    links: tuple[LinkFacts, ...] = (),
) -> tuple[str, ...]:
    decision = decide_all_reduce(
        device_type=device_type,
        group_size=size,
        is_within_node=within,
        devices=tuple(range(size)),
        host=HostFacts(links=links),
    )
    assert decision.reasons
    return decision.value


def test_all_reduce_prefers_peer_memory_and_falls_back() -> None:
    assert all_reduce(device_type="cpu") == ("gloo",)
    assert all_reduce() == ("symm_mem", "nccl")
    assert all_reduce(links=(LinkFacts(first=0, second=1, can_access_peer=True),))[0] == "symm_mem"
    assert all_reduce(size=1) == ("nccl",)
    assert all_reduce(size=16) == ("nccl",)
    assert all_reduce(within=False) == ("nccl",)


def test_all_reduce_keeps_off_a_link_that_does_not_work() -> None:
    assert all_reduce(links=(LinkFacts(first=0, second=1, can_access_peer=False),)) == ("nccl",)
    assert all_reduce(links=(LinkFacts(first=0, second=1, is_verified=False),)) == ("nccl",)
    assert all_reduce(links=(LinkFacts(first=0, second=5, is_verified=False),))[0] == "symm_mem"


def attention(
    requested: str = "auto",
    *,
    device_type: str = "cuda",
    dtype: str = "bfloat16",
    head_size: int = 128,
    flashinfer_available: bool = True,
) -> Decision[AttentionBackendName]:
    return decide_attention_backend(
        device_type=device_type,
        dtype=dtype,
        head_size=head_size,
        flashinfer_available=flashinfer_available,
        requested=requested,
    )


def test_attention_is_triton_on_gpus_and_names_all_that_stands_against_it() -> None:
    assert attention().value == "triton"
    assert attention(dtype="float16", flashinfer_available=False).value == "triton"
    awkward = attention(dtype="float32", head_size=80)
    on_cpu = attention(device_type="cpu")
    assert (awkward.value, len(awkward.reasons)) == ("torch", 2)
    assert (on_cpu.value, on_cpu.reasons) == ("torch", ("Triton needs CUDA, the device is cpu",))


@pytest.mark.parametrize("name", ["torch", "triton", "flashinfer"])
def test_a_requested_attention_backend_is_taken(name: str) -> None:
    decision = attention(name)
    assert decision.value == name
    assert decision.reasons == ("asked for; cuda, bfloat16, head size 128",)


def test_torch_attention_can_do_anything() -> None:
    assert attention("torch", device_type="cpu", dtype="float32", head_size=80).value == "torch"


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_an_attention_backend_that_cannot_do_the_shape_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: .* device is cpu"):
        attention(name, device_type="cpu")
    with pytest.raises(ConfigError, match=r"not float32; .* not 80"):
        attention(name, dtype="float32", head_size=80)


def test_flashinfer_that_is_not_installed_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match="not installed") as caught:
        attention("flashinfer", flashinfer_available=False)
    assert "pip install 'vcli-toolkit[gpu]'" in caught.value.hint


def test_an_unknown_attention_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'xformers' is unknown") as caught:
        attention("xformers")
    assert caught.value.hint == "one of auto, torch, flashinfer, triton"


@pytest.mark.parametrize(
    ("num_cpus", "workers", "requested", "value"),
    [
        (64, 8, None, 8),
        (2, 8, None, 1),
        (7, 2, None, 3),
        (64, 8, 4, 4),
        (64, 8, 0, 8),
        (4, 0, None, 4),
    ],
)
def test_omp_threads(num_cpus: int, workers: int, requested: int | None, value: int) -> None:
    decision = decide_omp_num_threads(
        num_cpus=num_cpus, num_local_workers=workers, requested=requested
    )

    assert decision.value == value


def test_decision_describes_itself_in_one_line() -> None:
    decision = decide_all_reduce(device_type="cuda", group_size=2, is_within_node=True)

    assert decision.describe().startswith("all_reduce: symm_mem, then nccl (2 GPUs on one node")
