"""Keys of a job's control connections: from a token that all nodes have to keys for CURVE.

Everybody derives the same server key. A client that does not know it can't even begin to talk, so
clients need no keys of their own: each makes a fresh pair. Without a token the key is a fixed one:
the connection is still encrypted, but anybody may join.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.utils import z85

from vcli.topology.errors import UnfitError

_PERSON: Final = b"vcli-job-key"
_NO_TOKEN: Final = b"vcli: everybody may join"


@dataclass(frozen=True, slots=True)
class JobKey:
    """The key pair of the server, known to all nodes; `is_secret` is false for the fixed one."""

    secret: bytes = field(repr=False)
    public: bytes = field(repr=False)
    is_secret: bool


def job_key(token: str | None) -> JobKey:
    """The key of the job with this token; None: the fixed key that keeps nobody out.

    Raises:
        UnfitError: the installed libzmq knows no CURVE.
    """
    if not zmq.has("curve"):
        raise UnfitError(
            f"libzmq {zmq.zmq_version()} has no CURVE encryption, which nodes talk by",
            hint="python -m pip install --force-reinstall pyzmq",
        )
    text = _NO_TOKEN if token is None else token.encode()
    # The token is hashed first: a key of blake2b has at most 64 bytes, a token any length.
    seed = hashlib.blake2b(text, digest_size=64).digest()
    raw = hashlib.blake2b(_PERSON, key=seed, digest_size=32).digest()
    secret = z85.encode(raw)
    return JobKey(secret, zmq.curve_public(secret), is_secret=token is not None)


def secure_server(sock: "zmq.Socket[bytes]", key: JobKey) -> None:
    """Let only clients in that know the job's key; to be called before bind."""
    sock.curve_server = True
    sock.curve_secretkey = key.secret
    sock.curve_publickey = key.public


def secure_client(sock: "zmq.Socket[bytes]", key: JobKey) -> None:
    """Talk only to a server of the job; to be called before connect."""
    public, secret = zmq.curve_keypair()
    sock.curve_publickey = public
    sock.curve_secretkey = secret
    sock.curve_serverkey = key.public
