"""`--device-ids`: the flag, and what it makes of this host and of its children's environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from vcli.topology import ConfigError, HostFacts, ParallelConfig
from vcli.topology.devices import (
    CUDA_VISIBLE_DEVICES,
    check_visible_devices,
    choose_devices,
    composed_variable,
    parse_device_ids,
)
from vcli.topology.placement import max_ranks_on_a_node, place_ranks

DeviceIds = Annotated[
    str | None,
    typer.Option(
        "--device-ids",
        help="GPUs of this node to use, in the order of its ranks: numbers within "
        "CUDA_VISIBLE_DEVICES, or UUIDs, which may be cut short (0,2 or GPU-8f3a).",
        metavar="LIST",
        show_default=False,
        rich_help_panel="Model",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDevices:
    """The host with the GPUs that may be used, and CUDA_VISIBLE_DEVICES for the children.

    `variable` is None where they inherit the user's; this process keeps its own in any case.
    """

    host: HostFacts
    variable: str | None

    def compose(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """The environment that the children will have."""
        if self.variable is None:
            return environ
        return {**environ, CUDA_VISIBLE_DEVICES: self.variable}


def check_device_ids(typed: str | None, device: str) -> None:
    """What can be said before anything is observed.

    Raises:
        ConfigError: no list of devices, or one for a CPU.
    """
    if typed is None:
        return
    if device == "cpu":
        raise ConfigError(
            f"--device-ids {typed} chooses GPUs, --device cpu uses none",
            hint="leave one of them out",
        )
    parse_device_ids(typed)


def own_devices(
    host: HostFacts,
    typed: str | None,
    environ: Mapping[str, str],
    *,
    parallel: ParallelConfig | None = None,
) -> OwnDevices:
    """What `--device-ids` leaves of this host; with `parallel`, enough for its ranks here.

    Raises:
        ConfigError: the flag names what is not there, or too little.
    """
    if typed is None:
        return OwnDevices(host=host, variable=None)
    variable = environ.get(CUDA_VISIBLE_DEVICES)
    num_ranks = max_ranks_on_a_node(place_ranks(parallel)) if parallel else None
    chosen = choose_devices(host, typed, variable=variable, num_ranks=num_ranks)
    return OwnDevices(host=chosen, variable=composed_variable(chosen, variable))


def refuse_hidden_devices(host: HostFacts, environ: Mapping[str, str], *, problem: str) -> None:
    """Whether CUDA_VISIBLE_DEVICES is a list that CUDA understands; with `problem` few is known.

    Raises:
        UnfitError: it hides all, or has an entry that means no GPU.
    """
    if host.gpus or not problem:
        check_visible_devices(host, environ.get(CUDA_VISIBLE_DEVICES))
