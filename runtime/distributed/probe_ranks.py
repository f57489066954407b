"""The processes of a trial: started, listened to until they end, ended where they hang.

Each process writes JSON objects, one a line: `rank`, `step`, `state` (started, done, failed), and
what the step found. Nothing here imports torch: whoever watches need not have it.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Final

MODULE: Final = "vcli.runtime.distributed.gpu_probe"
#: The step of a process that has written nothing yet: the interpreter starts, torch is imported.
START: Final = "start"
_END_S: Final = 10.0
_TAIL_CHARS: Final = 600

Event = dict[str, Any]
Emit = Callable[[Event], None]
Groups = Sequence[tuple[str, Sequence[int]]]
"""Kind and ranks of each group to be tried, in an order that is the same on all ranks."""


def rank_commands(
    devices: Sequence[int], store: str, *, device_type: str = "cuda", groups: Groups = ()
) -> list[list[str]]:
    """The command line of each rank; `store` is the path of an empty file that all can open."""
    arguments = [
        "--devices", ",".join(map(str, devices)), "--store", store, "--device-type", device_type,
        "--groups", json.dumps(groups),
    ]  # fmt: skip
    return [
        [sys.executable, "-P", "-m", MODULE, *arguments, "--rank", str(rank)]
        for rank in range(len(devices))
    ]


@contextmanager
def open_store() -> Iterator[str]:
    """The path of an empty memory file, for processes of this user while this one is here."""
    descriptor = os.memfd_create("vcli-probe")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@dataclass
class ProbeRanks:
    """The processes; their standard input is their lifeline. `end` must be called."""

    commands: Sequence[Sequence[str]]
    emit: Emit
    environ: Mapping[str, str] | None = None
    """None: that of this process."""
    steps: dict[int, str] = field(default_factory=dict)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    errors: list[IO[bytes]] = field(default_factory=list)
    has_told: set[int] = field(default_factory=set)
    """Ranks that said themselves why they failed."""

    def __post_init__(self) -> None:
        try:
            for rank, command in enumerate(self.commands):
                self.steps[rank] = START
                self.errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - closed in end()
                self.children.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self.errors[rank],
                        env=self.environ,
                    )
                )
        except OSError:
            self.end()
            raise

    def follow(
        self, step_limit_s: float, *, start_limit_s: float = 0.0, total_s: float = float("inf")
    ) -> bool:
        """Until all have ended, or one has failed, or nobody has got any further in time.

        `start_limit_s` is for those that have not begun yet, where it is longer; `total_s` bounds
        everything.
        """
        selector = selectors.DefaultSelector()
        for rank, child in enumerate(self.children):
            assert child.stdout is not None
            os.set_blocking(child.stdout.fileno(), False)
            selector.register(child.stdout, selectors.EVENT_READ, rank)
        rest = dict.fromkeys(range(len(self.children)), b"")
        last_end = time.monotonic() + total_s
        news = time.monotonic()
        while selector.get_map():
            has_begun = START not in self.steps.values()
            limit_s = step_limit_s if has_begun else max(step_limit_s, start_limit_s)
            deadline = min(news + limit_s, last_end)
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                self._hung(round(time.monotonic() - news, 1))
                return False
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                    if not self._ended(key.data):
                        return False
                    continue
                *lines, rest[key.data] = (rest[key.data] + data).split(b"\n")
                for line in lines:
                    self._take(key.data, line)
                news = time.monotonic()
        return True

    def end(self) -> None:
        """Kills what is left."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
        for errors in self.errors:
            errors.close()

    def _take(self, rank: int, line: bytes) -> None:
        try:
            event = json.loads(line)
            self.steps[rank] = event["step"]
            if event["state"] == "failed":
                self.has_told.add(rank)
        except (ValueError, KeyError, TypeError):
            return  # a library wrote to standard output
        self.emit(event)

    def _ended(self, rank: int) -> bool:
        try:
            status = self.children[rank].wait(_END_S)
        except subprocess.TimeoutExpired:
            self._hung(_END_S)
            return False
        if status == 0:
            return True
        # Who dies tears others along; whoever is read first, all that are dead by now are told.
        for other in sorted(range(len(self.children)), key=lambda other: other != rank):
            self._tell_death(other)
        return False

    def _tell_death(self, rank: int) -> None:
        status = self.children[rank].poll()
        if not status or rank in self.has_told:
            return
        self.errors[rank].seek(0)
        text = self.errors[rank].read().decode(errors="replace").strip()[-_TAIL_CHARS:]
        self.emit(
            {"rank": rank, "step": self.steps[rank], "state": "failed",
             "exit_status": status, "message": text}
        )  # fmt: skip

    def _hung(self, seconds: float) -> None:
        alive = [rank for rank, child in enumerate(self.children) if child.poll() is None]
        for rank in alive:
            self.emit({"rank": rank, "step": self.steps[rank], "state": "hung", "seconds": seconds})
