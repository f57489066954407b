"""A reader of the queue benchmark: `python -m vcli.runtime.bench.ipc_reader LINKS` (JSON).

It ends when it is told to, or when the writer is gone.
"""

import array
import contextlib
import signal
import sys
import time

import msgspec

from vcli.runtime.bench.ipc_messages import HEADER, Kind, ReaderLinks
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.errors import PeerDiedError

_REPLY_TIMEOUT_S = 30.0


def run_reader(links: ReaderLinks) -> None:
    """Take messages until STOP."""
    calls = BroadcastReader.attach(links.calls)
    replies = BroadcastWriter.attach(links.replies)
    answers_calls = links.calls.reader_index == 0
    noted = array.array("q")
    with contextlib.suppress(PeerDiedError):
        while True:
            kind, sent_ns = HEADER.unpack(calls.recv()[0])
            if kind == Kind.STAMP:
                noted.append(time.monotonic_ns() - sent_ns)
            elif kind == Kind.CALL:
                if answers_calls:
                    replies.send([b"done"], _REPLY_TIMEOUT_S)
            elif kind == Kind.REPORT:
                replies.send([noted.tobytes()], _REPLY_TIMEOUT_S)
                noted = array.array("q")
            elif kind == Kind.STOP:
                break
    replies.close()
    calls.close()


if __name__ == "__main__":
    # ^C in the terminal reaches the whole group; the writer says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_reader(msgspec.json.decode(sys.argv[1], type=ReaderLinks))
