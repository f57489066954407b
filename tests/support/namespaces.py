"""Runs the doctor in namespaces of its own: another /dev/shm, /etc/hosts or network."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@cache
def _missing() -> str:
    """Why there are no namespaces here; empty if there are."""
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--net", "sh", "-c", "mount -t tmpfs tmpfs /mnt && ip link"],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unshare: {error}"
    return done.stderr.strip() if done.returncode else ""


def run_doctor(
    setup: str,
    arguments: list[str],
    *,
    flags: tuple[str, ...] = ("--mount",),
    environ: dict[str, str] | None = None,
    prefix: str = "",
) -> tuple[int, dict[str, Any]]:
    """Exit status and document of `vcli doctor ARGUMENTS --json` after the shell lines of `setup`.

    `prefix` stands before the command, for `prlimit ...`.
    """
    if _missing():
        pytest.skip(f"no namespaces: {_missing()}")
    command = f'exec {prefix} "$0" -m vcli.cli doctor --json "$@"'
    done = subprocess.run(
        ["unshare", *flags, "sh", "-ec", f"{setup}\n{command}", sys.executable, *arguments],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, **(environ or {})},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def check_in(document: dict[str, Any], id_: str) -> dict[str, Any]:
    """The entry of one check in the document."""
    return next(item for item in document["checks"] if item["id"] == id_)
