"""A few pretend hosts on this machine, for programs that run on several.

Each host has a network, mounts (its own /dev/shm and /etc/hosts), a host name and a PID space of
its own, and hangs with one cable on a switch that no other network of this machine can see:

    host0 eth0 10.88.0.10 --+
    host1 eth0 10.88.0.11 --+-- switch (a bridge in a network namespace of its own)

The root file system is shared, so programs and models are there. No variable is set for programs:
they have to find their way by routes and addresses, as on real hosts. Needs root and iproute2, and
nftables for `drop_port`.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.support.bound import bound

_NET = "10.88.0"
_NUMBERS = itertools.count()

# Pid 1 of a host: makes its mounts, says so, then only reaps what becomes its child.
_INIT = r"""
set -e
hostname "$1"
mount --make-rprivate /
mount --bind "$2" /etc/hosts
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
ip link set lo up
echo up > "$3"
trap : TERM INT
while :; do sleep 1000 & wait $! || true; done
"""


@cache
def why_no_lab() -> str:
    """Why there can be no lab here; empty if there can."""
    if os.geteuid() != 0:
        return "a lab of several hosts needs root"
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"a lab of several hosts needs {program} (iproute2, util-linux)"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "ip", "link"],
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    return done.stderr.strip()


class Host:
    """One of them. `address` is what the others reach it by."""

    def __init__(self, lab: "Lab", index: int) -> None:
        self.index = index
        self.name = f"host{index}"
        self.address = f"{_NET}.{10 + index}"
        self._lab = lab
        self._init: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def boot(self) -> None:
        """Start pid 1 in namespaces of its own and plug the cable in."""
        folder = self._lab.folder
        sign = folder / f"up{self.index}"
        log = (folder / f"init{self.index}.log").open("wb")
        self._init = subprocess.Popen(
            bound([
                "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork",
                "--kill-child", "--mount-proc", "bash", "-c", _INIT, "init",
                self.name, str(folder / f"hosts{self.index}"), str(sign),
            ]),
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )  # fmt: skip
        log.close()
        self._lab.wait_for(sign.exists, f"{self.name} to boot")
        self._pid = _only_child(self._init.pid)
        port = self._port
        switch = self._lab.switch
        _run(
            "ip", "-n", switch, "link", "add", port, "type", "veth",
            "peer", "name", "eth0", "netns", str(self._pid),
        )  # fmt: skip
        _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    @property
    def _port(self) -> str:
        return f"port{self.index}"

    def command(self, *words: str | Path) -> list[str]:
        """The command line that runs `words` in this host, from outside of it."""
        enter = [f"--{name}" for name in ("net", "mount", "uts", "ipc", "pid")]
        return ["nsenter", "--target", str(self._pid), *enter, "--", *map(str, words)]

    def run(self, *words: str, timeout_s: float = 20) -> str:
        """What a command in this host prints."""
        return _run(*self.command(*words), timeout_s=timeout_s)

    def start(
        self, words: Sequence[str | Path], *, environ: Mapping[str, str]
    ) -> "subprocess.Popen[str]":
        """Start a program in this host; its standard error is a pipe."""
        return subprocess.Popen(
            self.command(*words),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> dict[int, str]:
        """Processes of this host but its pid 1: pid as this machine sees it -> command line."""
        return {
            pid: command
            for pid, command in _processes_in(self._namespace).items()
            if pid != self._pid and not command.startswith("sleep 1000")
        }

    def pid_of(self, title: str) -> int:
        """The process whose command line ends with `title`."""
        named = {pid: line.removesuffix(" (starting)") for pid, line in self.processes().items()}
        found = [pid for pid, line in named.items() if line.endswith(title)]
        assert len(found) == 1, (title, self.processes())
        return found[0]

    def own_pid(self, pid: int) -> int:
        """How the host itself counts the process that this machine calls `pid`."""
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
        raise AssertionError(f"no NSpid of {pid}")

    def interrupt(self, process: "subprocess.Popen[str]", number: int = signal.SIGINT) -> None:
        """Send a signal to the program that `start` gave, past nsenter."""
        os.kill(_only_child(process.pid), number)

    def unplug(self) -> None:
        """Pull the cable: packets vanish, nobody is told."""
        _run("ip", "-n", self._lab.switch, "link", "set", self._port, "down")

    def drop_port(self, port: int) -> None:
        """A firewall that silently drops what comes in for a TCP port."""
        self.run("nft", "add table inet lab")
        self.run("nft", "add chain inet lab in { type filter hook input priority 0; }")
        self.run("nft", f"add rule inet lab in tcp dport {port} drop")

    def crash(self) -> None:
        """Everything in it is killed at once; it stays down."""
        os.kill(self._pid, signal.SIGKILL)
        assert self._init is not None
        self._init.wait(10)

    def shut_down(self) -> None:
        """Remove it."""
        if self._init is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid or self._init.pid, signal.SIGKILL)
        self._init.wait(10)

    @property
    def _namespace(self) -> str:
        return self._lab.namespaces[self.index]

    def note_namespace(self) -> str:
        """Which PID space is this host's."""
        return str(Path(f"/proc/{self._pid}/ns/pid").readlink())

    def left_in_shm(self) -> list[str]:
        """Files in the host's /dev/shm."""
        return self.run("ls", "-A", "/dev/shm").split()


class Lab:
    """`count` hosts on one switch.

    With `names_are_loopback` each host's own name stands for 127.0.1.1, as Debian writes it.
    """

    def __init__(self, count: int, folder: Path, *, names_are_loopback: bool = False) -> None:
        self.folder = folder
        self._names_are_loopback = names_are_loopback
        self.switch = f"lab-{os.getpid()}-{next(_NUMBERS)}"
        self.hosts = [Host(self, index) for index in range(count)]
        self.namespaces: list[str] = []

    def boot(self) -> None:
        """Start the switch, then every host."""
        for own in self.hosts:
            lines = ["127.0.0.1 localhost"]
            for host in self.hosts:
                is_loopback = host is own and self._names_are_loopback
                lines.append(f"{'127.0.1.1' if is_loopback else host.address} {host.name}")
            (self.folder / f"hosts{own.index}").write_text("\n".join(lines) + "\n")
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for host in self.hosts:
            host.boot()
        self.namespaces = [host.note_namespace() for host in self.hosts]

    def shut_down(self) -> None:
        """Remove everything."""
        for host in self.hosts:
            host.shut_down()
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True, timeout=20)

    def wait_for(self, is_true, what: str, timeout_s: float = 10) -> None:
        """Until `is_true()`."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            time.sleep(0.02)


@contextlib.contextmanager
def lab_of(count: int, folder: Path, *, names_are_loopback: bool = False) -> Iterator[Lab]:
    """A lab that is gone afterwards, whatever happened."""
    lab = Lab(count, folder, names_are_loopback=names_are_loopback)
    try:
        lab.boot()
        yield lab
    finally:
        lab.shut_down()


def _processes_in(namespace: str) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if str((entry / "ns/pid").readlink()) != namespace:
                continue
            if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            found[int(entry.name)] = command.strip()
    return found


def _only_child(pid: int) -> int:
    deadline = time.monotonic() + 5
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        assert time.monotonic() < deadline, f"{pid} has no child"
        time.sleep(0.01)


def _run(*words: str, timeout_s: float = 20) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout
