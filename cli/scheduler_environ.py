"""Which node of how many this is, as a scheduler's variables say it where no flag does.

torchrun goes first, as it may run inside of a step of Slurm or a pod. Of Slurm only a step counts,
what `srun` started: in the script of `sbatch` and the shell of `salloc` SLURM_NODEID is 0 on the
one node that runs them, so nothing is taken from there.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from vcli.cli.hosts import expand_nodelist
from vcli.topology import ConfigError
from vcli.topology.config import MAX_RANKS

_NUMBER: Final = re.compile(r"[0-9]{1,9}")
#: Slurm's `2(x3),1` are the tasks on each of four nodes; others have one number.
_COUNTS: Final = re.compile(r"(?:^|,)([0-9]{1,9})")
#: Numbers above are no steps of `srun`, but batch scripts, interactive shells and the like.
_MAX_STEP: Final = 0xFFFFFFF0
_FLAGS: Final[Mapping[str, str]] = {
    "nnodes": "--nnodes",
    "node_rank": "--node-rank",
    "master_addr": "--master-addr",
    "master_port": "--master-port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedPlace:
    """What the flags say; None for a flag that was left out."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlace:
    """What the variables add to the flags.

    `values` has the parameters that were left out by name, `variables` the variable of each.
    `conflicts` has a sentence for each flag that a variable contradicts.
    """

    values: Mapping[str, int | str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`nnodes 2 (SLURM_STEP_NUM_NODES) · node-rank 1 (SLURM_NODEID)`, empty without any."""
        return " · ".join(
            f"{_FLAGS[name][2:]} {value} ({self.variables[name]})"
            for name, value in self.values.items()
        )

    def words(self) -> list[str]:
        """The flags that say the same."""
        return [word for name, value in self.values.items() for word in (_FLAGS[name], str(value))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheduler:
    """Its variables for each parameter; of several names the first that is set counts."""

    signs: tuple[str, ...]
    """The variables it is known by."""
    places: Mapping[str, tuple[str, ...]]
    counts: tuple[str, ...] = ()
    """How many processes it started on a node."""
    local_ranks: tuple[str, ...] = ()
    one_per_node: str = ""
    """How to start one on each node."""


_TORCHRUN: Final = _Scheduler(
    signs=("TORCHELASTIC_RUN_ID",),
    places={
        "nnodes": ("GROUP_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",),
        "master_addr": ("MASTER_ADDR",),
    },
    counts=("LOCAL_WORLD_SIZE",),
    local_ranks=("LOCAL_RANK",),
    one_per_node="torchrun --nproc-per-node 1",
)
#: Without its own store on MASTER_PORT, torchrun leaves that port to the ranks.
_TORCHRUN_WITHOUT_STORE: Final = replace(
    _TORCHRUN, places={**_TORCHRUN.places, "master_port": ("MASTER_PORT",)}
)
#: A step may run on a part of the job: its own variables go first, as SLURM_NODEID counts in it.
_SLURM: Final = _Scheduler(
    signs=("SLURM_STEP_ID",),
    places={
        "nnodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "node_rank": ("SLURM_NODEID",),
        "master_addr": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    },
    counts=("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    local_ranks=("SLURM_LOCALID",),
    one_per_node="srun --ntasks-per-node=1 vcli launch",
)
#: A pod is a node.
_LEADER_WORKER_SET: Final = _Scheduler(
    signs=("LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"),
    places={
        "nnodes": ("LWS_GROUP_SIZE",),
        "node_rank": ("LWS_WORKER_INDEX",),
        "master_addr": ("LWS_LEADER_ADDRESS",),
    },
)


def find_place(typed: TypedPlace, environ: Mapping[str, str]) -> FoundPlace:
    """What a scheduler says about this node, where the flags leave it open.

    On one node nothing but their number is taken: `--nnodes 1` in a larger job is a server of its
    own on each node.

    Raises:
        ConfigError: a variable that is missing, no number or out of range, or several processes
            on a node.
    """
    scheduler = _scheduler_of(environ)
    if scheduler is None:
        return FoundPlace()
    found = _Variables(scheduler, environ)
    conflicts = tuple(found.conflicts(typed))
    values: dict[str, int | str] = {}
    nnodes = typed.nnodes
    if nnodes is None:
        nnodes = values["nnodes"] = found.number("nnodes", 1, MAX_RANKS)
    if typed.node_rank is None and typed.nnodes != 1:
        found.check_one_per_node()
    if nnodes > 1:
        if typed.node_rank is None:
            values["node_rank"] = found.number("node_rank", 0, nnodes - 1)
        if typed.master_addr is None:
            values["master_addr"] = found.host("master_addr")
        if typed.master_port is None and "master_port" in scheduler.places:
            values["master_port"] = found.number("master_port", 1, 65534)
    variables = {name: found.get(name)[0] for name in values}
    return FoundPlace(values=values, variables=variables, conflicts=conflicts)


def _scheduler_of(environ: Mapping[str, str]) -> _Scheduler | None:
    if _first(_TORCHRUN.signs, environ):
        has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return _TORCHRUN if has_store else _TORCHRUN_WITHOUT_STORE
    _, step = _first(_SLURM.signs, environ) or ("", "")
    if re.fullmatch(r"[0-9]{1,10}", step) and int(step) <= _MAX_STEP:
        return _SLURM
    return _LEADER_WORKER_SET if _first(_LEADER_WORKER_SET.signs, environ) else None


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The first of the variables that is set, and its text."""
    return next(((name, environ[name]) for name in names if environ.get(name)), None)


class _Variables:
    """The variables of one scheduler, read and checked."""

    def __init__(self, scheduler: _Scheduler, environ: Mapping[str, str]) -> None:
        self._scheduler = scheduler
        self._environ = environ

    def get(self, parameter: str) -> tuple[str, str]:
        """The variable that says it, and its text; the first name and nothing where none does."""
        names = self._scheduler.places[parameter]
        return _first(names, self._environ) or (names[0], "")

    def number(self, parameter: str, lowest: int, highest: int) -> int:
        """The value of a variable within the two limits."""
        name, text = self._required(parameter)
        if not _NUMBER.fullmatch(text) or not lowest <= int(text) <= highest:
            raise ConfigError(
                f"{name}={text!r} must be a number in {lowest}..{highest}",
                hint=self._hint(parameter, name),
            )
        return int(text)

    def host(self, parameter: str) -> str:
        """The first host of a variable."""
        name, text = self._required(parameter)
        try:
            return expand_nodelist(text)[0]
        except ConfigError as error:
            raise ConfigError(
                f"{name}: {error.message}", hint=self._hint(parameter, name)
            ) from error

    def check_one_per_node(self) -> None:
        """One launcher starts all ranks of its node."""
        name, text = _first(self._scheduler.counts, self._environ) or ("", "")
        is_several = any(int(count) > 1 for count in _COUNTS.findall(text))
        if not is_several:
            name, text = _first(self._scheduler.local_ranks, self._environ) or ("", "0")
            is_several = text != "0"
        if is_several:
            raise ConfigError(
                f"{name}={text} means several processes on a node; one vcli launch starts all "
                "ranks of its node",
                hint=f"{self._scheduler.one_per_node}; or type --nnodes and --node-rank",
            )

    def conflicts(self, typed: TypedPlace) -> Iterator[str]:
        """What to say about each flag that a variable contradicts."""
        for parameter in self._scheduler.places:
            value = getattr(typed, parameter)
            name, text = self.get(parameter)
            if value is not None and text and not self._agrees(parameter, text, value):
                yield f"{name}={text} but {_FLAGS[parameter]} is {value}: the flag wins"

    def _agrees(self, parameter: str, text: str, value: int | str) -> bool:
        if isinstance(value, int):
            return _NUMBER.fullmatch(text) is not None and int(text) == value
        try:
            return _can_be_same_host(self.host(parameter), value)
        except ConfigError:
            return False

    def _required(self, parameter: str) -> tuple[str, str]:
        name, text = self.get(parameter)
        if text:
            return name, text
        sign, there = _first(self._scheduler.signs, self._environ) or ("", "")
        raise ConfigError(
            f"{name} is not set, although {sign}={there} is",
            hint=f"set it, or type {_FLAGS[parameter]}",
        )

    def _hint(self, parameter: str, name: str) -> str:
        return f"mend {name}, or type {_FLAGS[parameter]}, which goes before it"


def _can_be_same_host(one: str, other: str) -> bool:
    """False only for two addresses, or two names, that differ; nothing is resolved."""
    first, second = _address(one), _address(other)
    if first is None and second is None:
        return one.partition(".")[0].lower() == other.partition(".")[0].lower()
    return first is None or second is None or first == second


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
