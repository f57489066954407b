"""Who this process is among the ranks that a launcher started, from its environment."""

from collections.abc import Mapping
from typing import Final

from vcli.runtime.config import LaunchedRank
from vcli.topology.errors import ConfigError

#: Rank, local rank and world size, by launcher; the first complete set counts.
_VARIABLES: Final = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
}
_HINT = "torchrun --nproc-per-node N script.py; or --distributed-executor-backend mp"


def launched_rank(environ: Mapping[str, str]) -> LaunchedRank:
    """The rank that torchrun, Open MPI or MPICH gave this process.

    MASTER_ADDR and MASTER_PORT say where the ranks meet; torchrun sets them, with MPI the user.

    Raises:
        ConfigError: no launcher's variables, or values that make no sense.
    """
    names = next((names for names in _VARIABLES.values() if set(names) <= environ.keys()), None)
    if names is None:
        known = "; ".join(f"{who}: {', '.join(names)}" for who, names in _VARIABLES.items())
        raise ConfigError(f"no launcher has said which rank this process is ({known})", hint=_HINT)
    rank, local_rank, world_size = (_number(environ, name) for name in names)
    if not 0 <= rank < world_size:
        raise ConfigError(f"{names[0]}={rank} is no rank of {names[2]}={world_size}", hint=_HINT)
    if not 0 <= local_rank <= rank:
        raise ConfigError(f"{names[1]}={local_rank} does not fit {names[0]}={rank}", hint=_HINT)
    if world_size > 1 and not environ.get("MASTER_ADDR"):
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT must say where the ranks meet",
            hint="mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500 ...",
        )
    is_hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchedRank(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=_number(environ, "MASTER_PORT") if world_size > 1 else 0,
        is_store_hosted=is_hosted,
        store_prefix=f"vcli/attempt_{attempt}" if is_hosted else "",
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} is no number", hint=_HINT)
    return int(text)
