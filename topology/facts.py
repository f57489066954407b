"""What was observed on a host and in a process, as frozen data with a JSON round trip.

The defaults describe a machine that nobody looked at: one CPU, no GPU, nothing initialised.
Collecting the facts is the work of others; here is no system call.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from vcli.topology.errors import ConfigError


class JsonFacts:
    """Round trip of a facts dataclass through plain JSON values."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, in the order of the fields."""
        return {field.name: _to_plain(getattr(self, field.name)) for field in _fields_of(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The facts that `to_json` wrote; unknown keys are ignored, missing ones get defaults.

        Raises:
            ConfigError: a required field is missing, or a value has another type.
        """
        if not isinstance(document, Mapping):
            raise ConfigError(f"{cls.__name__}: expected a JSON object, got {document!r}")
        hints = typing.get_type_hints(cls)
        try:
            return cls(
                **{
                    field.name: _from_plain(hints[field.name], document[field.name])
                    for field in _fields_of(cls)
                    if field.name in document
                }
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{cls.__name__}: {error}", hint="save the facts again with vcli doctor --json"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts(JsonFacts):
    """One GPU that a launch may use; `None` means not known.

    `index` is its place among those, `visible_index` its place within CUDA_VISIBLE_DEVICES,
    `physical_index` NVML's number; see `devices`.
    """

    index: int
    name: str = "unknown GPU"
    uuid: str = ""
    pci_bus_id: str = ""
    compute_capability: tuple[int, int] | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    numa_node: int | None = None
    is_mig: bool = False
    pci_path: tuple[str, ...] = ()
    """PCI addresses from the root complex down to the device, as sysfs has them."""
    visible_index: int | None = None
    physical_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts(JsonFacts):
    """The way between two GPUs.

    `kind` is as `nvidia-smi topo` writes it: `NV18`, `PIX`, `PXB`, `PHB`, `NODE` or `SYS`.
    `can_access_peer` is what the driver says, `is_verified` what a checked copy said; None if not
    known.
    """

    first: int
    second: int
    kind: str = "SYS"
    can_access_peer: bool | None = None
    is_verified: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NicFacts(JsonFacts):
    """One network interface."""

    name: str
    addresses: tuple[str, ...] = ()
    mtu: int | None = None
    speed_mbit: int | None = None
    is_up: bool = True
    is_loopback: bool = False
    rdma_device: str | None = None
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts(JsonFacts):
    """One machine as this process may use it: affinity, quotas and visible devices count.

    `is_assumed` marks facts that nobody observed; nothing is refused because of them.
    """

    hostname: str = "localhost"
    platform: str = "linux"
    machine: str = "x86_64"
    kernel: str = ""
    python: str = ""
    is_wsl: bool = False
    is_container: bool = False
    is_assumed: bool = False
    cpu_count: int = 1
    cpu_model: str = ""
    cpu_flags: tuple[str, ...] = ()
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    numa_cpus: tuple[tuple[int, ...], ...] = ()
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    nics: tuple[NicFacts, ...] = ()

    @property
    def usable_memory_bytes(self) -> int | None:
        """Free bytes that a process may take: what is available, within the cgroup's limit."""
        known = [
            size
            for size in (self.memory_available_bytes, self.memory_limit_bytes)
            if size is not None
        ]
        return min(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts(JsonFacts):
    """The process that is about to start children.

    `num_threads` counts threads of the operating system, so the pools of libraries too.
    `cuda_initialized_by` names who did it, where known. `main_has_guard` tells whether the main
    module can be imported again without starting everything again; None if there is no main file.
    """

    platform: str = "linux"
    cuda_initialized: bool = False
    cuda_initialized_by: str | None = None
    xpu_initialized: bool = False
    num_threads: int = 1
    has_libgomp_pool: bool = False
    in_ray_actor: bool = False
    in_ray_placement_group: bool = False
    numa_bind: bool = False
    is_wsl: bool = False
    main_has_guard: bool | None = True
    has_fork_server: bool = False
    omp_num_threads: int | None = None


def assumed_host(*, num_gpus: int = 0, cpu_count: int = 8) -> HostFacts:
    """A machine to plan for that nobody looked at."""
    return HostFacts(
        is_assumed=True,
        cpu_count=cpu_count,
        gpus=tuple(GpuFacts(index=index) for index in range(num_gpus)),
    )


def _fields_of(facts: object) -> tuple[Any, ...]:
    if not is_dataclass(facts):
        raise TypeError(f"{facts!r} is no dataclass")
    return fields(facts)


def _to_plain(value: object) -> Any:
    if isinstance(value, JsonFacts):
        return value.to_json()
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return value


def _from_plain(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is None:
            return None
        return _from_plain(next(item for item in arguments if item is not type(None)), value)
    if origin is tuple and isinstance(value, list | tuple):
        item_hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(_from_plain(item, part) for item, part in zip(item_hints, value, strict=True))
    if isinstance(hint, type) and issubclass(hint, JsonFacts):
        return hint.from_json(value)
    if type(value) is not hint:
        raise ValueError(f"expected {getattr(hint, '__name__', hint)}, got {value!r}")
    return value
