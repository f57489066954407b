"""What an instance does while it starts, in words, from the states that its processes report."""

from collections.abc import Mapping
from typing import Final

from vcli.runtime.messages import ChildMessage, ChildState

#: What comes after each state; those that are reported in parts are still reached then.
_NEXT: Final[Mapping[str, str]] = {
    "spawned": "importing",
    "imported": "opening the devices",
    "device": "joining the ranks",
    "joined": "verifying the groups",
    "groups": "loading the weights",
    "weights": "measuring the memory",
    "memory": "allocating the KV cache",
    "kv": "warming up",
}
_DURING: Final[Mapping[str, str]] = {"weights": "loading the weights", "graphs": "capturing graphs"}


class StartPhase:
    """The phase of whichever process reported last."""

    def __init__(self, doing: str = "starting the processes") -> None:
        self.doing = doing

    def take(self, message: ChildMessage) -> None:
        """Note what a process reached; from any thread."""
        if not isinstance(message, ChildState):
            return
        is_under_way = message.fraction is not None and message.fraction < 1.0
        table = _DURING if is_under_way else _NEXT
        self.doing = table.get(message.state, "warming up")
