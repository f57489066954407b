"""One writer, many readers, between the processes of one machine: both ends of a queue."""

from vcli.runtime.ipc.broadcast_reader import BroadcastReader
from vcli.runtime.ipc.broadcast_writer import BroadcastWriter

# The one place that users import from; either end alone would be half a queue.
__all__ = ["BroadcastReader", "BroadcastWriter"]
