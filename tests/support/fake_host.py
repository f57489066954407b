"""A made-up host for checks: a tree of files, a network, packages, and a context around them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vcli.diagnostics import Check, CheckContext, CheckResult, Dialect
from vcli.diagnostics.check import result_of
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.packages import Packages, TorchBuild
from vcli.diagnostics.runner import run_check
from vcli.diagnostics.sockets import BindProblem, Network
from vcli.topology import HostFacts, NicFacts, ParallelConfig, plan_topology

GIB = 1024**3

HEALTHY_FILES: Mapping[str, str] = {
    "proc/version": "Linux version 6.8.0 (builder) #1 SMP",
    "proc/self/cgroup": "0::/user.slice",
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
    "proc/self/limits": (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max processes             63000                63000                processes \n"
        "Max open files            1024                 524288               files     \n"
        "Max locked memory         8388608              8388608              bytes     \n"
    ),
    "proc/loadavg": "0.1 0.1 0.1 1/300 1234",
    "proc/sys/kernel/threads-max": "127000",
    "proc/sys/kernel/pid_max": "4194304",
    "proc/sys/kernel/yama/ptrace_scope": "1",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/sys/fs/nr_open": "1048576",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory pids",
    "sys/fs/cgroup/user.slice/memory.events": "oom 0\noom_kill 0\n",
    "dev/shm/.keep": "",
    "home/me/.keep": "",
    "tmp/.keep": "",
}


def make_tree(root: Path, files: Mapping[str, str] | None = None) -> Path:
    """The healthy files, with `files` in place of some of them; an empty text removes a file."""
    for name, text in {**HEALTHY_FILES, **(files or {})}.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text or path.name == ".keep":
            path.write_text(text)
        else:
            path.unlink(missing_ok=True)
    return root


@dataclass
class FakeNetwork(Network):
    """Names, interfaces, routes and taken ports as told."""

    name: str = "gpu-a"
    interfaces: tuple[str, ...] = ("lo", "eth0")
    names: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"gpu-a": ("10.0.0.1",)})
    own: tuple[str, ...] = ("127.0.0.1", "10.0.0.1")
    toward: str | None = "10.0.0.1"
    taken: tuple[int, ...] = ()

    def host_name(self) -> str:
        return self.name

    def interface_names(self) -> tuple[str, ...]:
        return self.interfaces

    def addresses_of(self, name: str) -> tuple[str, ...]:
        return self.names.get(name, ())

    def address_toward(self, address: str) -> str | None:
        return "127.0.0.1" if address.startswith("127.") else self.toward

    def bind_problem(self, address: str, port: int) -> BindProblem | None:
        if address not in self.own:
            return BindProblem(code=99, text="Cannot assign requested address")
        if port in self.taken:
            return BindProblem(code=98, text="Address already in use")
        return None


@dataclass
class FakePackages(Packages):
    """Installed versions as told."""

    versions: dict[str, str] = field(
        default_factory=lambda: {"msgspec": "0.20", "nvidia-ml-py": "13.0", "torch": "2.13.0"}
    )
    needs: tuple[str, ...] = ("msgspec>=0.19", 'pytest>=9; extra == "dev"')
    torch: TorchBuild | None = field(
        default_factory=lambda: TorchBuild(version="2.13.0+cpu", cuda=None, hip=None)
    )
    folders: dict[str, Path] = field(default_factory=dict)
    owned: tuple[tuple[str, str], ...] = ()

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def requirements(self) -> tuple[str, ...]:
        return self.needs

    def folder(self, module: str) -> Path | None:
        return self.folders.get(module)

    def provides(self, distribution: str, file_name: str) -> bool:
        return (distribution, file_name) in self.owned

    def torch_build(self) -> TorchBuild | None:
        return self.torch


HEALTHY_HOST = HostFacts(
    hostname="gpu-a",
    kernel="6.8.0-generic",
    cpu_count=16,
    memory_total_bytes=64 * GIB,
    memory_available_bytes=60 * GIB,
    nics=(
        NicFacts(name="lo", addresses=("127.0.0.1",), is_loopback=True),
        NicFacts(name="eth0", addresses=("10.0.0.1",), mtu=9000, speed_mbit=100_000),
    ),
)


def make_context(
    root: Path,
    *,
    files: Mapping[str, str] | None = None,
    host: HostFacts = HEALTHY_HOST,
    config: Mapping[str, Any] | None = None,
    device_type: str = "cpu",
    plan_with: Mapping[str, Any] | None = None,
    **fields: Any,
) -> CheckContext:
    """A context around a healthy host; `config` are sizes, `fields` replace those of the context.

    `tp`, `pp` and `dp` in `config` stand for the long names.
    """
    long = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
    sizes = {
        f"{long[name]}_parallel_size" if name in long else name: value
        for name, value in (config or {}).items()
    }
    plan = plan_topology(
        ParallelConfig(**sizes),
        host=replace(host, is_assumed=True),
        device_type=device_type,
        **(plan_with or {}),
    )
    defaults: dict[str, Any] = {
        "files": HostFiles(make_tree(root, files)),
        "environ": {"HOME": "/home/me"},
        "network": FakeNetwork(),
        "packages": FakePackages(),
        "dialect": Dialect.BARE_METAL,
        "pause": lambda seconds: None,
    }
    return CheckContext(plan=plan, host=host, **{**defaults, **fields})


def run(check: Check, context: CheckContext) -> CheckResult:
    """The result of one check, as the runner would make it; a crash shows its trace."""
    finding, trace = run_check(check, context)
    assert not trace, trace
    return result_of(check, finding, dialect=context.dialect, seconds=0.0)
