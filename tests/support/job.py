"""`vcli launch` on the hosts of a lab: what each node says, how it ends, what it leaves."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.lab import Host

VCLI = (sys.executable, "-m", "vcli.cli")
_URL = re.compile(r"at (http://\S+)")
#: What the programs of a lab must find out by themselves.
_NOT_PASSED_ON = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "VCLI_JOB_TOKEN")


class Node:
    """One launcher, with what it said so far."""

    def __init__(
        self,
        host: Host,
        arguments: Sequence[str],
        *,
        folder: Path,
        environ: Mapping[str, str],
        program: Sequence[str] = VCLI,
    ) -> None:
        self.host = host
        self.tmp = folder / f"tmp-{host.name}-{time.monotonic_ns()}"
        self.tmp.mkdir(parents=True)
        kept = {name: text for name, text in os.environ.items() if name not in _NOT_PASSED_ON}
        self.process = host.start(
            [*program, "launch", *arguments],
            environ={**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.tmp), **environ},
        )
        self.lines: list[str] = []
        self.ended_at: float | None = None
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        self.process.wait()
        with self._news:
            self.ended_at = time.monotonic()
            self.lines.append("<end>")
            self._news.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_line(self, pattern: str, *, timeout_s: float = 90) -> str:
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

    def wait_serving(self) -> str:
        """The base URL of node 0, once its port is open."""
        found = _URL.search(self.wait_line(r"serving .* at http://", timeout_s=180))
        assert found is not None
        return found[1]

    def wait_exit(self, timeout_s: float = 30) -> int:
        """The exit status; all that was said is in `output` afterwards."""
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status

    def stop(self, number: int = signal.SIGINT) -> None:
        """What ^C, or another signal, does."""
        self.host.interrupt(self.process, number)

    @property
    def errors(self) -> list[str]:
        """What it said was wrong."""
        return [line for line in self.lines if line.startswith("error: ")]

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.host.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


class Job:
    """A job over hosts; node i runs on hosts[i]."""

    def __init__(self, hosts: Sequence[Host], folder: Path, model: Path) -> None:
        self.hosts = list(hosts)
        self.folder = folder
        self.model = model
        self.nodes: list[Node] = []

    def start(
        self,
        node_rank: int,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        program: Sequence[str] = VCLI,
        is_scheduled: bool = False,
    ) -> Node:
        """Start one node; where it is scheduled, `environ` or `program` tell it its place."""
        host = self.hosts[node_rank]
        place = [
            "-n", str(len(self.hosts)), "-r", str(node_rank),
            "--master-addr", self.hosts[0].address,
        ]  # fmt: skip
        node = Node(
            host,
            [
                *([] if is_scheduled else place),
                "--max-model-len", "256", "--kv-cache-memory", "32M",
                *(["--host", host.address, "--port", "8000"] if node_rank == 0 else []),
                "--served-model-name", "model", *flags, str(self.model),
            ],
            folder=self.folder,
            environ=environ or {},
            program=program,
        )  # fmt: skip
        self.nodes.append(node)
        return node

    def start_all(self, *flags: str, environ: Mapping[str, str] | None = None) -> tuple[Node, ...]:
        """Start all nodes at about the same time."""
        return tuple(self.start(rank, *flags, environ=environ) for rank in range(len(self.hosts)))

    def wait_nothing_left(self, within_s: float, *, since: float) -> None:
        """No process of the job lives on any host, and no file of it is left."""
        deadline = since + within_s
        while left := {host.name: found for host in self.hosts if (found := host.processes())}:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        for node in self.nodes:
            assert list(node.tmp.iterdir()) == []

    def ask(self, url: str, prompt: str | list[int], **options: object) -> dict:
        """A completion, asked for on host 0 itself."""
        body = json.dumps(
            {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 8, **options}
        )
        program = (
            "import sys, urllib.request as r; "
            "q = r.Request(sys.argv[1] + '/v1/completions', sys.argv[2].encode(), "
            "{'content-type': 'application/json'}); "
            "print(r.urlopen(q, timeout=120).read().decode())"
        )
        return json.loads(self.hosts[0].run(VCLI[0], "-c", program, url, body, timeout_s=130))


@contextlib.contextmanager
def job_of(hosts: Sequence[Host], folder: Path, model: Path) -> Iterator[Job]:
    """A job that is gone afterwards, whatever happened."""
    job = Job(hosts, folder, model)
    try:
        yield job
    finally:
        for node in job.nodes:
            node.end()
