"""The facts that `topo` plans with: seen here, saved elsewhere, or assumed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vcli.cli.device_ids import check_device_ids, own_devices, refuse_hidden_devices
from vcli.cli.environment import Environment
from vcli.diagnostics import collect_host_facts, has_nvidia_gpu
from vcli.topology import ConfigError, HostFacts, ParallelConfig, PlanWarning
from vcli.topology.hardware import (
    DEFAULT_GPU,
    NetworkLink,
    assumed_gpu_host,
    gpu_kind,
    kind_of_gpu,
    parse_link,
)

FACTS_SCHEMA: Final = "vcli.facts/1"
_DEFAULT_GPUS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoFacts:
    """One host for each node where they are known, else the first for all.

    `source` says for people where they come from; `is_live` whether it is this machine.
    """

    hosts: tuple[HostFacts, ...]
    device_type: str
    link: NetworkLink | None
    source: str
    is_live: bool = False
    warnings: tuple[PlanWarning, ...] = ()

    @property
    def host(self) -> HostFacts:
        """The first node's."""
        return self.hosts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsRequest:
    """What was typed about the machines."""

    device: str
    facts: Sequence[str]
    gpus: int | None
    gpu: str | None
    link: str | None
    device_ids: str | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is unknown", hint="auto, cpu or cuda")
        if self.facts and (self.gpus is not None or self.gpu is not None):
            raise ConfigError(
                "--facts says what the machine has, --gpus and --gpu assume another",
                hint="leave out one of them",
            )
        if self.device == "cpu" and (self.gpus is not None or self.gpu is not None):
            raise ConfigError(
                "--device cpu contradicts --gpus and --gpu", hint="leave out one of them"
            )
        check_device_ids(self.device_ids, self.device)
        if self.device_ids is not None and len(self.facts) > 1:
            raise ConfigError(
                f"--device-ids {self.device_ids} chooses GPUs of one node, "
                f"{len(self.facts)} --facts were given",
                hint="one --facts, or leave out --device-ids",
            )


def find_facts(request: FactsRequest, environment: Environment, *, num_ranks: int) -> TopoFacts:
    """The facts to plan with; so many GPUs as `num_ranks` are assumed where none is seen.

    Raises:
        ConfigError: a file that holds no facts, or an unknown kind of GPU.
    """
    link = parse_link(request.link) if request.link else None
    if request.facts:
        hosts = tuple(load_facts(Path(environment.cwd, path)) for path in request.facts)
        names = ", ".join(
            f"{host.hostname} ({p})" for host, p in zip(hosts, request.facts, strict=True)
        )
        device = _device(request.device, has_gpus=bool(hosts[0].gpus))
        return TopoFacts(hosts=hosts, device_type=device, link=link, source=f"saved: {names}")
    if request.gpus is not None or request.gpu is not None:
        count = _DEFAULT_GPUS if request.gpus is None else request.gpus
        host = assumed_gpu_host(gpu_kind(request.gpu or DEFAULT_GPU), count, link=link)
        source = f"assumed: {count} x {host.gpus[0].name} a node"
        return TopoFacts(hosts=(host,), device_type="cuda", link=link, source=source)
    return _live(request, environment, link, num_ranks=num_ranks)


def choose_own_devices(
    facts: TopoFacts,
    request: FactsRequest,
    environment: Environment,
    *,
    parallel: ParallelConfig | None,
) -> TopoFacts:
    """The facts with the GPUs that `--device-ids` names; with `parallel`, enough for its ranks.

    Raises:
        ConfigError: the flag names what is not there, or too little.
        UnfitError: CUDA_VISIBLE_DEVICES of this machine is no list that CUDA understands.
    """
    typed = request.device_ids
    if typed is None:
        return facts
    # The variable says nothing about a machine that is saved or assumed.
    environ = environment.environ if facts.is_live else {}
    if facts.is_live:
        refuse_hidden_devices(facts.host, environ, problem="")
    is_guessed = facts.host.is_assumed and request.gpus is None and request.gpu is None
    if is_guessed or (facts.is_live and facts.device_type != "cuda"):
        raise ConfigError(
            f"--device-ids {typed}: no GPU is seen on {facts.host.hostname}",
            hint="--gpus 8 to assume some, or leave out --device-ids",
        )
    chosen = own_devices(facts.host, typed, environ, parallel=parallel)
    return replace(facts, hosts=(chosen.host,))


def collect_facts(environment: Environment) -> tuple[HostFacts, str]:
    """Everything about this machine, and why its GPUs are known less than they could be."""
    from vcli.diagnostics.host import collect_numa_cpus
    from vcli.diagnostics.network import collect_nics

    host = replace(collect_host_facts(), nics=collect_nics(), numa_cpus=collect_numa_cpus())
    if not has_nvidia_gpu():
        return host, ""
    from vcli.diagnostics.gpu import collect_gpus

    seen = collect_gpus(environment.environ)
    gpus = []
    for gpu in seen.gpus:
        kind = kind_of_gpu(gpu)
        known = gpu.memory_total_bytes or (kind.memory_bytes if kind else None)
        gpus.append(replace(gpu, memory_total_bytes=known))
    found = replace(
        host,
        gpus=tuple(gpus),
        links=seen.links,
        driver_version=seen.driver_version,
        cuda_driver_version=seen.cuda_driver_version,
    )
    return found, seen.problem


def save_facts(path: Path, host: HostFacts) -> None:
    """Write the facts for `--facts` on another machine.

    Raises:
        ConfigError: the file cannot be written.
    """
    document = {"schema": FACTS_SCHEMA, "host": host.to_json()}
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", hint="name a file in a folder of yours"
        ) from error


def load_facts(path: Path) -> HostFacts:
    """What `save_facts` wrote, or the host in the document of `vcli doctor --json`.

    Raises:
        ConfigError: unreadable, or it holds no facts.
    """
    hint = "save them on the machine: vcli topo --save-facts FILE"
    try:
        document: Any = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON: {error}", hint=hint) from error
    host = document.get("host") if isinstance(document, dict) else None
    if not isinstance(host, dict):
        raise ConfigError(f"{path} holds no facts about a host", hint=hint)
    return HostFacts.from_json(host)


def _live(
    request: FactsRequest, environment: Environment, link: NetworkLink | None, *, num_ranks: int
) -> TopoFacts:
    host, problem = collect_facts(environment)
    device = _device(request.device, has_gpus=bool(host.gpus))
    source = f"seen on this machine ({host.hostname})"
    if device == "cpu" or host.gpus:
        warnings = (
            (PlanWarning(id="FACT-03", message=f"the GPUs' links are not known. {problem}"),)
            if problem and device == "cuda"
            else ()
        )
        return TopoFacts(
            hosts=(host,),
            device_type=device,
            link=link,
            source=source,
            is_live=True,
            warnings=warnings,
        )
    kind = gpu_kind(DEFAULT_GPU)
    assumed = assumed_gpu_host(kind, min(num_ranks, 64), cpu_count=host.cpu_count, link=link)
    why = f" ({problem})" if problem else ""
    warning = PlanWarning(
        id="FACT-01",
        message=f"no GPU is seen on {host.hostname}{why}: {len(assumed.gpus)} x {kind.title} are "
        "assumed; --gpus N --gpu KIND says which",
    )
    return TopoFacts(
        hosts=(replace(assumed, hostname=host.hostname),),
        device_type="cuda",
        link=link,
        source=f"assumed: {len(assumed.gpus)} x {kind.title} a node",
        warnings=(warning,),
    )


def _device(typed: str, *, has_gpus: bool) -> str:
    if typed == "auto":
        return "cuda" if has_gpus else "cpu"
    return typed
