"""A node's link to the engine core: calls come in and go straight on to the workers."""

from collections.abc import Callable, Sequence

from vcli.runtime.errors import FailureReport
from vcli.runtime.executor.node_messages import (
    TO_NODE,
    AskNode,
    FrameKind,
    NodeHello,
    NodeMessage,
    message_frames,
)
from vcli.runtime.ipc.curve import JobKey
from vcli.runtime.ipc.node_endpoint import Event, Gone, Received
from vcli.runtime.ipc.remote import NodeLink

_FLUSH_S = 0.5


class CoreLink:
    """Connects at once; the callbacks run in the link's thread.

    `on_call` gets the frames of a call, `on_ask` the number of a question, `on_stop` why the
    workers shall end (None: in order), `on_gone` why the core cannot be heard any more.
    """

    def __init__(
        self,
        place: tuple[str, int],
        key: JobKey,
        hello: NodeHello,
        *,
        on_call: Callable[[list[bytes]], None],
        on_ask: Callable[[int], None],
        on_stop: Callable[[FailureReport | None], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._on_call = on_call
        self._on_ask = on_ask
        self._on_stop = on_stop
        self._on_gone = on_gone
        self._link = NodeLink(*place, key, self._on_event)
        self.say(hello)
        self._link.start()

    def say(self, message: NodeMessage) -> None:
        """Tell the core something."""
        self._link.send(message_frames(message))

    def send(self, frames: Sequence[bytes]) -> None:
        """Send frames that are a message already."""
        self._link.send(frames)

    def close(self) -> None:
        """End the connection, after what was said went out."""
        self._link.close(_FLUSH_S)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Gone):
            self._on_gone(event.reason)
        elif isinstance(event, Received):
            kind, *frames = event.frames
            if kind == FrameKind.CALL:
                self._on_call(frames)
            elif kind == FrameKind.MESSAGE:
                message = TO_NODE.decode(frames[0])
                if isinstance(message, AskNode):
                    self._on_ask(message.number)
                else:
                    self._on_stop(message.report)
