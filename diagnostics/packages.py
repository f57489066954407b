"""What is installed, found without importing it."""

import importlib.util
import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "vcli-toolkit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The Python that runs vcli."""

    version: tuple[int, int, int] = field(default_factory=lambda: sys.version_info[:3])
    executable: str = field(default_factory=lambda: sys.executable)
    is_virtual: bool = field(default_factory=lambda: sys.prefix != sys.base_prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What torch's own version file says; `cuda` is None in a build without CUDA."""

    version: str
    cuda: str | None
    hip: str | None


class Packages:
    """The installed distributions of this interpreter; tests give made-up ones."""

    def version(self, distribution: str) -> str | None:
        """The installed version, None if it is not installed."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> tuple[str, ...]:
        """What vcli's own metadata asks for, extras included (`name>=1; extra == "gpu"`)."""
        try:
            return tuple(metadata.requires(DISTRIBUTION) or ())
        except metadata.PackageNotFoundError:
            return ()

    def folder(self, module: str) -> Path | None:
        """Where the top-level module lies; it is not imported."""
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
        return Path(spec.origin).parent if spec.origin else None

    def provides(self, distribution: str, file_name: str) -> bool:
        """Whether the distribution lists a file of this name."""
        try:
            files = metadata.files(distribution)
        except metadata.PackageNotFoundError:
            return False
        return any(str(path) == file_name for path in files or ())

    def torch_build(self) -> TorchBuild | None:
        """What torch was built for; None if it is not installed or says nothing."""
        folder = self.folder("torch")
        if folder is None:
            return None
        try:
            return parse_torch_version((folder / "version.py").read_text())
        except OSError:
            return None


def parse_torch_version(text: str) -> TorchBuild | None:
    """The values of a torch/version.py, read as text."""
    found: dict[str, str | None] = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        key, word = name.split(":")[0].strip(), value.strip()
        if separator and key in ("__version__", "cuda", "hip"):
            found[key] = None if word == "None" else word.strip("'\"")
    version = found.get("__version__")
    if version is None:
        return None
    return TorchBuild(version=version, cuda=found.get("cuda"), hip=found.get("hip"))


def version_tuple(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0); what follows the first odd part is left out."""
    numbers: list[int] = []
    for part in text.split("+", maxsplit=1)[0].split("."):
        match = re.match(r"\d+", part)
        if match is None:
            break
        numbers.append(int(match[0]))
        if match[0] != part:
            break
    return tuple(numbers)
