"""What `doctor` and the preflight judge: this host, the plan, the named model."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vcli.cli.build import resolve_dtype
from vcli.cli.device_ids import check_device_ids, own_devices
from vcli.diagnostics import (
    CheckContext,
    ModelInput,
    PortUse,
    collect_host_facts,
    detect_dialect,
    has_nvidia_gpu,
)
from vcli.topology import (
    ConfigError,
    HostFacts,
    ModelSpec,
    ParallelConfig,
    ProcessFacts,
    TopologyPlan,
    VcliError,
    check_model_fits,
    model_spec_from_config,
    plan_topology,
)

#: NVML answers within milliseconds, or hangs with a broken driver.
_NVML_DEADLINE_S = 5.0
_DEFAULT_HTTP_PORT = 8000
_RAS_PORT = 28028


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What was typed, beside the sizes."""

    model: str | None
    dtype: str
    device: str
    port: int | None
    host: str
    device_ids: str | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is unknown", hint="auto, cpu or cuda")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535", hint="--port 8000")
        check_device_ids(self.device_ids, self.device)


def observe_host(environ: Mapping[str, str]) -> tuple[HostFacts, str]:
    """Everything about this host, and why its GPUs are known less than they could be.

    A driver that does not answer costs `_NVML_DEADLINE_S` and is told as the reason.
    """
    from vcli.diagnostics.gpu import GpuObservation, collect_gpus
    from vcli.diagnostics.host import collect_numa_cpus
    from vcli.diagnostics.network import collect_nics

    seen: list[GpuObservation] = []
    observer = threading.Thread(
        target=lambda: seen.append(collect_gpus(environ)), name="observe-gpus", daemon=True
    )
    observer.start()
    host = replace(collect_host_facts(), nics=collect_nics(), numa_cpus=collect_numa_cpus())
    observer.join(_NVML_DEADLINE_S)
    if not seen:
        return host, f"NVML did not answer within {_NVML_DEADLINE_S:g} s"
    found = seen[0]
    return (
        replace(
            host,
            gpus=found.gpus,
            links=found.links,
            driver_version=found.driver_version,
            cuda_driver_version=found.cuda_driver_version,
        ),
        found.problem,
    )


def make_context(
    request: DoctorRequest, parallel: ParallelConfig, *, environ: Mapping[str, str], cwd: Path
) -> CheckContext:
    """The context of a doctor's run.

    Raises:
        ConfigError: a path that does not exist, or a name that is none.
    """
    model = find_model(request.model, environ=environ, cwd=cwd) if request.model else None
    host, problem = observe_host(environ)
    devices = own_devices(host, request.device_ids, environ)
    host, environ = devices.host, devices.compose(environ)
    device_type = request.device
    if device_type == "auto":
        device_type = "cuda" if host.gpus or has_nvidia_gpu() else "cpu"
    process = ProcessFacts(platform=host.platform, is_wsl=host.is_wsl)
    plan = plan_as_far_as_possible(
        parallel,
        host,
        process,
        spec=model.spec if model else None,
        dtype=request.dtype,
        device_type=device_type,
    )
    return CheckContext(
        plan=plan,
        host=host,
        environ=environ,
        process=process,
        dialect=detect_dialect(environ),
        model=model,
        ports=ports_of(plan, port=request.port, address=request.host),
        gpu_problem=problem,
    )


def plan_as_far_as_possible(
    parallel: ParallelConfig,
    host: HostFacts,
    process: ProcessFacts,
    *,
    spec: ModelSpec | None,
    dtype: str,
    device_type: str,
) -> TopologyPlan:
    """The plan; without the model where it does not fit, without the devices where they lack.

    What was left out is found again by the checks (FIT-02, GPU-01).
    """
    assumed = replace(host, is_assumed=True)
    if spec is not None:
        try:
            check_model_fits(spec, parallel)
            resolved = resolve_dtype(dtype, spec)
            return plan_topology(
                parallel,
                host=assumed,
                process=process,
                model=spec,
                dtype=resolved,
                device_type=device_type,
            )
        except VcliError:
            parallel = replace(parallel, is_moe=parallel.is_moe or spec.is_moe)
    return plan_topology(parallel, host=assumed, process=process, device_type=device_type)


def ports_of(
    plan: TopologyPlan, *, port: int | None, address: str, with_http: bool = True
) -> tuple[PortUse, ...]:
    """The fixed ports that this node would listen on; `port` is what was typed for HTTP."""
    own = plan.config.own_node_rank
    uses = [
        PortUse(
            purpose=item.purpose,
            address=item.host,
            port=item.port,
            flag="--master-port",
            is_typed=True,
        )
        for item in plan.ports
        if item.node_rank == own and item.port
    ]
    if with_http and own == 0 and port != 0:
        uses.append(
            PortUse(
                purpose="HTTP",
                address=address,
                port=port or _DEFAULT_HTTP_PORT,
                flag="--port",
                is_typed=port is not None,
            )
        )
    if plan.device_type == "cuda":
        uses.append(
            PortUse(
                purpose="NCCL's status server",
                address="127.0.0.1",
                port=_RAS_PORT,
                flag="NCCL_RAS_ADDR=localhost:",
                is_typed=False,
            )
        )
    return tuple(uses)


def find_model(typed: str, *, environ: Mapping[str, str], cwd: Path) -> ModelInput:
    """The model as far as it is on this machine; nothing is downloaded or converted.

    Raises:
        ConfigError: neither a path that exists nor a name on the Hub.
    """
    from vcli.cli.topo_model import cached_snapshot, is_hub_name

    path = Path(cwd, typed).expanduser()
    if path.is_file() and path.name == "config.json":
        path = path.parent
    if path.is_dir():
        return _from_folder(typed, path)
    if path.is_file():
        return _from_file(typed, path)
    if is_hub_name(typed):
        cached = cached_snapshot(typed, environ)
        if cached is not None:
            return replace(_from_folder(typed, cached), is_hub_name=True)
        return ModelInput(typed=typed, is_hub_name=True)
    raise ConfigError(
        f"model {typed!r} does not exist",
        hint="--model takes a folder with config.json, a .gguf file, or a name on the Hub "
        "(Qwen/Qwen3-0.6B)",
    )


def _from_folder(typed: str, folder: Path) -> ModelInput:
    config_path = folder / "config.json"
    try:
        config: Any = json.loads(config_path.read_text())
        if not isinstance(config, dict):
            raise ConfigError(f"{config_path} holds no JSON object", hint="download it again")
        spec = model_spec_from_config(config, source=str(config_path))
    except ConfigError as error:
        return ModelInput(typed=typed, folder=folder, problem=error)
    except OSError as error:
        problem = ConfigError(
            f"{config_path}: {error.strerror}",
            hint="name the folder that holds config.json, or download the model again",
        )
        return ModelInput(typed=typed, folder=folder, problem=problem)
    except ValueError as error:
        problem = ConfigError(
            f"{config_path} is no valid JSON: {error}", hint="download or copy it again"
        )
        return ModelInput(typed=typed, folder=folder, problem=problem)
    return ModelInput(typed=typed, folder=folder, config=config, spec=spec)


def _from_file(typed: str, path: Path) -> ModelInput:
    if path.suffix.lower() != ".gguf":
        problem = ConfigError(
            f"{path} is neither a folder nor a .gguf file",
            hint=f"--model {path.parent}" if path.parent != Path() else "name the folder",
        )
        return ModelInput(typed=typed, problem=problem)
    from vcli.cli.topo_model import read_topo_model

    try:
        spec = read_topo_model(str(path), path.parent, environ={}).spec
    except VcliError as error:
        return ModelInput(typed=typed, problem=ConfigError(error.message, hint=error.hint))
    return ModelInput(typed=typed, spec=spec)


def split_words(
    words: Sequence[str], *, is_known: Callable[[str], bool], cwd: Path
) -> tuple[list[str], str | None]:
    """Check names, and the one word that is the path of a model instead.

    Raises:
        ConfigError: two paths.
    """
    names: list[str] = []
    model: str | None = None
    for word in words:
        if is_known(word) or not ("/" in word or Path(cwd, word).exists()):
            names.append(word)
        elif model is not None:
            raise ConfigError(f"two models: {model} and {word}", hint="name one")
        else:
            model = word
    return names, model
