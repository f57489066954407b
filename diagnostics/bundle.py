"""Everything that an issue needs in one archive; every text goes through `redact`."""

import io
import json
import tarfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.kernel_log import read_kernel_log
from vcli.diagnostics.redact import redact, redact_environ, redact_values
from vcli.topology import ConfigError

#: Files of the system that tell about limits, memory and devices.
_SYSTEM_FILES: Final = (
    "/proc/version",
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/self/limits",
    "/proc/self/cgroup",
    "/proc/self/mountinfo",
    "/proc/driver/nvidia/version",
    "/proc/net/dev",
    "/etc/hosts",
    "/etc/os-release",
)
_KERNEL_WORDS: Final = ("NVRM", "nvidia", "oom", "Out of memory", "mlx5", "segfault", "AER")
_MAX_FILE_BYTES: Final = 1 << 20


def bundle_texts(
    context: CheckContext, document: Mapping[str, Any], report_text: str
) -> dict[str, str]:
    """Name -> text of every file of the bundle, secrets removed."""
    texts = {
        "report.txt": redact(report_text),
        "report.json": json.dumps(redact_values(document), indent=2),
        "environment.txt": "\n".join(
            f"{name}={value}" for name, value in sorted(redact_environ(context.environ).items())
        ),
        "packages.txt": "\n".join(
            sorted(f"{item.name}=={item.version}" for item in metadata.distributions())
        ),
        "kernel.txt": _kernel_lines(context),
    }
    for name in _SYSTEM_FILES:
        try:
            text = context.files.read(name)
        except CannotMeasureError as error:
            text = str(error)
        if text:
            texts[f"system{name}"] = redact(text[:_MAX_FILE_BYTES])
    return texts


def write_bundle(path: Path, texts: Mapping[str, str]) -> None:
    """Write the archive.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in texts.items():
                content = (text + "\n").encode()
                member = tarfile.TarInfo(f"{path.name.split('.')[0]}/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", hint="name a file in a folder of yours"
        ) from error


def _kernel_lines(context: CheckContext) -> str:
    try:
        log = read_kernel_log(context.files)
    except CannotMeasureError as error:
        return str(error)
    return redact(
        "\n".join(line for line in log.splitlines() if any(word in line for word in _KERNEL_WORDS))
    )
