"""NCCL's own status server (RAS, since 2.24): asked in its text protocol, without its client."""

import socket
import time
from collections.abc import Mapping
from typing import Final

from vcli.diagnostics.errors import CannotMeasureError

DEFAULT_ADDRESS: Final = ("localhost", 28028)
#: RAS itself gives its peers 5 s for each leg.
DEADLINE_S: Final = 12.0
_CONNECT_S: Final = 2.0
_MAX_BYTES: Final = 1 << 20


def ras_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where the RAS server of processes with these variables listens; None if it is off.

    Raises:
        CannotMeasureError: NCCL_RAS_ADDR is no `host:port`.
    """
    if environ.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return None
    typed = environ.get("NCCL_RAS_ADDR", "").strip()
    if not typed:
        return DEFAULT_ADDRESS
    host, _, port = typed.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise CannotMeasureError(f"NCCL_RAS_ADDR={typed} is no host:port")
    return host.strip("[]") or "localhost", int(port)


def ask_ras(host: str, port: int, *, deadline_s: float = DEADLINE_S) -> str:
    """The whole answer to `verbose status`, at most a mebibyte of it.

    Raises:
        CannotMeasureError: nobody listens, or the answer does not end in time.
    """
    end_s = time.monotonic() + deadline_s
    parts: list[bytes] = []
    try:
        with socket.create_connection((host, port), timeout=min(_CONNECT_S, deadline_s)) as link:
            link.sendall(b"verbose status\n")
            while sum(map(len, parts)) < _MAX_BYTES:
                link.settimeout(max(0.01, end_s - time.monotonic()))
                part = link.recv(1 << 16)
                if not part:
                    break
                parts.append(part)
    except TimeoutError as error:
        raise CannotMeasureError(
            f"{host}:{port} gave no full answer in {deadline_s:g} s"
        ) from error
    except OSError as error:
        raise CannotMeasureError(f"{host}:{port}: {error.strerror or error}") from error
    return b"".join(parts).decode(errors="replace").strip()
