"""A real `vcli serve` in a process of its own, and what it may leave behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.bound import bound

_URL = re.compile(r"at (http://\S+)")


class Server:
    """Runs `vcli serve ARGUMENTS --port 0`; collects its stderr, finds its family by session."""

    def __init__(
        self, arguments: list[str], *, folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self.tmp = folder / f"tmp-{uuid.uuid4().hex}"
        self.tmp.mkdir(parents=True)
        self._shm_before = set(Path("/dev/shm").iterdir())
        self.process = subprocess.Popen(
            bound([sys.executable, "-m", "vcli.cli", "serve", *arguments, "--port", "0"]),
            env={
                **os.environ,
                **(environ or {}),
                "TMPDIR": str(self.tmp),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.lines.append("<end>")
            self._news.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_line(self, pattern: str, *, timeout_s: float = 120) -> str:
        """The first line, said already or to come, in which `pattern` is found."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if re.search(pattern, line):
                        return line
                    if line == "<end>":
                        raise AssertionError(f"ended without {pattern!r}:\n{self.output}")
                seen = len(self.lines)
                left = deadline - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    raise AssertionError(f"no {pattern!r} in {timeout_s} s:\n{self.output}")

    def wait_serving(self, *, timeout_s: float = 180) -> str:
        """The base URL, once the port is open."""
        found = _URL.search(self.wait_line(r"serving .* at http://", timeout_s=timeout_s))
        assert found is not None
        return found[1]

    def wait_exit(self, *, timeout_s: float = 30) -> int:
        """The exit status; all that was said is in `output` afterwards."""
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status

    def family(self) -> dict[int, str]:
        """Processes that came from this server and live: pid -> title or command."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                if int(session) != self.pid or state == "Z":
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(entry.name)] = command.strip()
        return found

    def pid_of(self, title: str) -> int:
        """The process whose title ends with `title`."""
        found = [pid for pid, command in self.family().items() if _is_titled(command, title)]
        assert len(found) == 1, (title, self.family())
        return found[0]

    def wait_nothing_left(self, *, timeout_s: float = 3) -> None:
        """No process of the family lives, no file is in the temporary folder or /dev/shm."""
        deadline = time.monotonic() + timeout_s
        while self.family() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.family() == {}, self.family()
        assert list(self.tmp.iterdir()) == [], list(self.tmp.iterdir())
        new_shm = set(Path("/dev/shm").iterdir()) - self._shm_before
        assert new_shm == set(), new_shm

    def metrics(self, url: str) -> dict[str, float]:
        """Every sample of /metrics by its bare name, summed over its labels."""
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            text = response.read().decode()
        samples: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0]
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def end(self) -> None:
        """Kill what is left of the family."""
        for pid in (self.pid, *self.family()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _is_titled(command: str, title: str) -> bool:
    return command.removesuffix(" (starting)").endswith(title)


@contextlib.contextmanager
def serving(
    arguments: list[str], *, folder: Path, environ: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that is gone afterwards, whatever happened."""
    server = Server(arguments, folder=folder, environ=environ)
    try:
        yield server
    finally:
        server.end()
