"""The job token: what all nodes of a job know and nobody else does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vcli.topology.errors import ConfigError

TOKEN_VARIABLE: Final = "VCLI_JOB_TOKEN"
_SHORTEST: Final = 8


def read_job_token(path: str | None, environ: Mapping[str, str]) -> str | None:
    """The token of `--job-token-file`, or of VCLI_JOB_TOKEN, or None; without space around it.

    Raises:
        ConfigError: a file that can't be read, or a token that is empty or can be guessed.
    """
    if path is not None:
        source = f"--job-token-file {path}"
        try:
            token = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(
                f"{source} can't be read: {reason}",
                hint=f"openssl rand -hex 16 > {path}   (and the same file on all nodes)",
            ) from error
    elif TOKEN_VARIABLE in environ:
        source, token = TOKEN_VARIABLE, environ[TOKEN_VARIABLE].strip()
    else:
        return None
    if len(token) < _SHORTEST:
        raise ConfigError(
            f"{source} has a token of {len(token)} characters, at least {_SHORTEST} are needed",
            hint="openssl rand -hex 16",
        )
    return token
