"""Ray on this host, from the command lines of its raylets: Ray itself is never imported."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles

_CURRENT_CLUSTER: Final = "/tmp/ray/ray_current_cluster"
_DEFAULT_PORT: Final = 6379
_CONNECT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One raylet. Empty or None: its command line does not tell.

    `environ` is what its workers inherit; None where this user may not read it.
    """

    pid: int
    node_ip: str = ""
    gcs_address: str = ""
    session: str = ""
    num_gpus: float | None = None
    python: str = ""
    version: str = ""
    environ: Mapping[str, str] | None = field(default=None)


def find_ray_nodes(files: HostFiles) -> tuple[RayNode, ...]:
    """The raylets of this host (of this pid namespace), by pid."""
    found = []
    for name in files.names("/proc"):
        if name.isdigit():
            words = (_read(files, f"/proc/{name}/cmdline") or "").split("\0")
            if words[0].endswith("/raylet"):
                found.append(_node(files, int(name), words))
    return tuple(sorted(found, key=lambda node: node.pid))


def cluster_address(environ: Mapping[str, str], files: HostFiles) -> tuple[str, int] | None:
    """Where the GCS of the cluster is that a program here would join; None: it starts one.

    Raises:
        CannotMeasureError: RAY_ADDRESS is no address.
    """
    typed = environ.get("RAY_ADDRESS", "").strip()
    if typed == "local":
        return None
    if typed in ("", "auto"):
        nodes = find_ray_nodes(files)
        typed = (files.read(_CURRENT_CLUSTER) or "").strip() or (
            nodes[0].gcs_address if nodes else ""
        )
    if not typed:
        return None
    host, colon, port = typed.removeprefix("ray://").rpartition(":")
    if not colon:
        host, port = port, str(_DEFAULT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise CannotMeasureError(f"RAY_ADDRESS={typed} is no host:port")
    return host.strip("[]"), int(port)


def tcp_problem(host: str, port: int, deadline_s: float = _CONNECT_S) -> str:
    """Why nothing answers there; empty where something does."""
    try:
        socket.create_connection((host, port), timeout=deadline_s).close()
    except TimeoutError:
        return f"no answer in {deadline_s:g} s"
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _node(files: HostFiles, pid: int, words: list[str]) -> RayNode:
    flags = {}
    for word in words[1:]:
        name, equals, value = word.lstrip("-").partition("=")
        if equals:
            flags[name.replace("-", "_")] = value
    python = re.search(r"/python(\d+\.\d+)/", words[0])
    return RayNode(
        pid=pid,
        node_ip=flags.get("node_ip_address", ""),
        gcs_address=flags.get("gcs_address", ""),
        session=flags.get("session_dir", ""),
        num_gpus=_resource(flags.get("static_resource_list", ""), "GPU"),
        python=python[1] if python else "",
        version=_installed_version(files, words[0]),
        environ=_environ(files, pid),
    )


def _resource(listed: str, name: str) -> float | None:
    """From `node:10.0.0.1,1.0,CPU,8,GPU,2`; 0 where the list has no such resource."""
    words = listed.split(",")
    if len(words) < 2:
        return None
    amounts = dict(zip(words[::2], words[1::2], strict=False))
    try:
        return float(amounts.get(name, 0))
    except ValueError:
        return None


def _installed_version(files: HostFiles, raylet: str) -> str:
    folder, found, _ = raylet.partition("/ray/core/")
    if not found:
        return ""
    try:
        names = files.names(folder)
    except CannotMeasureError:
        return ""
    matches = (re.fullmatch(r"ray-(\d[\w.]*?)\.dist-info", name) for name in names)
    return next((match[1] for match in matches if match), "")


def _environ(files: HostFiles, pid: int) -> Mapping[str, str] | None:
    text = _read(files, f"/proc/{pid}/environ")
    if text is None:
        return None
    pairs = (entry.partition("=") for entry in text.split("\0") if entry)
    return {name: value for name, _, value in pairs}


def _read(files: HostFiles, name: str) -> str | None:
    try:
        return files.read(name)
    except CannotMeasureError:
        return None
