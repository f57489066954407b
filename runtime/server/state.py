"""What the routes share."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.server.errors import DrainingError, UnknownModelError
from vcli.runtime.server.json_values import shortened


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The engine and the facts about this server. `is_draining` turns new requests away."""

    engine: AsyncEngine
    served_name: str
    server_info: Mapping[str, Any]
    version: str
    started_at: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False

    def admit(self, model: str | None) -> None:
        """Let a request for `model` in; an unnamed model is the served one.

        Raises:
            DrainingError: the server is about to stop.
            EngineDeadError: the engine is dead.
            UnknownModelError: another model than the served one.
        """
        if self.is_draining:
            raise DrainingError("the server is shutting down and takes no new requests")
        self.engine.check_alive()
        self.check_model(model)

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModelError when `model` is named and not the served one."""
        if model and model != self.served_name:
            raise UnknownModelError(
                f"the model {shortened(model)!r} does not exist",
                parameter="model",
                hint=f"this server has {self.served_name!r}",
            )
