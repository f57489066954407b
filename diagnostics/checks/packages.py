"""PY: interpreter and installed packages; nothing is imported."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, skipped, unknown, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.host import has_nvidia_gpu
from vcli.diagnostics.packages import DISTRIBUTION, version_tuple
from vcli.diagnostics.text import listing, plural

MIN_PYTHON: Final = (3, 11)

_REQUIREMENT: Final = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?$")


@check(
    "PY-01",
    "Python",
    why="vcli does not run on an older Python, and packages of the system's own break with it",
    expected="Python 3.11 or newer, in a virtual environment",
    remedy=Remedy(
        bare_metal="python3.12 -m venv .venv && .venv/bin/pip install vcli-toolkit",
        docker="use an image with Python 3.11 or newer",
    ),
    is_preflight=True,
    is_headline=True,
)
def interpreter(context: CheckContext) -> Finding:
    """Compares the interpreter's version with the oldest supported one.

    Whether it runs in a virtual environment is said, not judged.
    """
    python = context.interpreter
    version = ".".join(map(str, python.version))
    if python.version[:2] < MIN_PYTHON:
        return failed(f"Python {version} at {python.executable}")
    place = "virtual environment" if python.is_virtual else "system interpreter"
    return passed(f"Python {version} ({place})")


@check(
    "PY-02",
    "required packages",
    why="a missing package ends the start only when its module is first used",
    expected="every package that vcli's metadata asks for, in the versions that it names",
    remedy=Remedy(
        bare_metal="pip install {packages}",
        docker="add to the image: RUN pip install {packages}",
    ),
)
def required(context: CheckContext) -> Finding:
    """Compares the installed versions with the requirements in vcli's own metadata.

    Missing fails, outside the range warns. With GPUs the packages of the extra `gpu` count too, as
    a warning: they make it faster.
    """
    requirements = context.packages.requirements()
    if not requirements:
        return unknown(f"{DISTRIBUTION} is not installed as a package, so its needs are not listed")
    missing: list[str] = []
    outside: list[str] = []
    wanted: list[str] = []
    for name, ranges, is_extra in _needs(requirements, with_gpu=context.is_cuda):
        version = context.packages.version(name)
        if version is None:
            (outside if is_extra else missing).append(f"{name} is missing")
        elif not _is_within(version, ranges):
            outside.append(f"{name} {version} is outside {ranges}")
        else:
            continue
        wanted.append(f"'{name}{ranges}'")
    values = {"packages": " ".join(wanted)}
    if missing:
        return failed(listing([*missing, *outside]), values=values)
    if outside:
        return warned(listing(outside), values=values)
    return passed(f"{plural(len(requirements), 'requirement')} met")


def _needs(requirements: tuple[str, ...], *, with_gpu: bool) -> Iterator[tuple[str, str, bool]]:
    """Name, version range and whether it is an extra, of what holds here."""
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            continue
        name, ranges, marker = match[1], match[2].strip(" ()"), match[3] or ""
        if "extra" not in marker:
            yield name, ranges, False
        elif with_gpu and re.search(r"extra\s*==\s*['\"]gpu['\"]", marker):
            yield name, ranges, True


def _is_within(version: str, ranges: str) -> bool:
    installed = version_tuple(version)
    for part in ranges.split(","):
        match = re.match(r"\s*(>=|<=|==|<|>|!=|~=)\s*([\w.*]+)", part)
        if match is None:
            continue
        bound = version_tuple(match[2])
        width = max(len(installed), len(bound))
        left = installed + (0,) * (width - len(installed))
        right = bound + (0,) * (width - len(bound))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "<": left < right,
            ">": left > right,
            "==": installed[: len(bound)] == bound,
            "!=": installed[: len(bound)] != bound,
            "~=": left >= right and installed[: len(bound) - 1] == bound[:-1],
        }[match[1]]
        if not holds:
            return False
    return True


@check(
    "PY-03",
    "torch's build against this machine",
    why="the wrong build of torch sees no GPU, or refuses the driver",
    expected="a CUDA build for GPUs, for a CUDA that the driver knows",
    remedy=Remedy(
        bare_metal="choose CUDA {version} on https://pytorch.org/get-started/locally and run the "
        "line it shows, with --force-reinstall",
        docker="in the image: install torch for CUDA {version} by the line that "
        "https://pytorch.org/get-started/locally shows",
    ),
    is_preflight=True,
    is_headline=True,
)
def torch_build(context: CheckContext) -> Finding:
    """Reads torch's version file as text and compares it with the GPUs and their driver.

    A build without CUDA fails where the ranks shall run on GPUs. A build for a newer major CUDA
    than the driver's fails; a newer minor one warns: most of it works.
    """
    build = context.packages.torch_build()
    if build is None:
        return failed(
            "torch is not installed",
            expected="torch 2.11 or newer",
            remedy="pip install 'torch>=2.11'",
        )
    measured = f"torch {build.version} (not imported)"
    driver = version_tuple(context.host.cuda_driver_version or "")
    if build.cuda is None:
        if not context.is_cuda:
            has_gpu = bool(context.host.gpus) or has_nvidia_gpu(context.files.root)
            return passed(measured + (", planned for the CPU" if has_gpu else ""))
        return failed(
            f"{measured} has no CUDA, the plan is for GPUs",
            values={"version": _newest_cuda(driver)},
        )
    built = version_tuple(build.cuda)
    if not driver or built[:2] <= driver[:2]:
        return passed(measured)
    text = f"torch {build.version} is for CUDA {build.cuda}, the driver knows up to " + (
        ".".join(map(str, driver[:2]))
    )
    values = {"version": _newest_cuda(driver)}
    if built[0] > driver[0]:
        return failed(text, values=values)
    return warned(
        text, why="kernels compiled at run time need the driver's own CUDA", values=values
    )


def _newest_cuda(driver: tuple[int, ...]) -> str:
    """The newest CUDA that torch is built for and a driver with this CUDA runs."""
    known = ((13, 0), (12, 8), (12, 6), (11, 8))
    fitting = next((tag for tag in known if tag <= driver[:2]), None)
    major, minor = fitting or (known[0] if not driver else known[-1])
    return f"{major}.{minor}"


@check(
    "PY-04",
    "the NVML module is NVIDIA's",
    why="the outdated `pynvml` package hides NVIDIA's module of the same name",
    expected="`pynvml` comes from nvidia-ml-py",
    remedy=Remedy(
        bare_metal="pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        docker="in the image: RUN pip uninstall -y pynvml && pip install --force-reinstall "
        "nvidia-ml-py",
    ),
)
def nvml_module(context: CheckContext) -> Finding:
    """Looks up which installed distribution owns the module `pynvml`.

    Newer `pynvml` distributions bring no such module and depend on nvidia-ml-py: they are fine.
    """
    packages = context.packages
    old = packages.version("pynvml")
    if old and (
        packages.provides("pynvml", "pynvml.py")
        or packages.provides("pynvml", "pynvml/nvml.py")
        or packages.version("nvidia-ml-py") is None
    ):
        return warned(f"pynvml {old} owns the module")
    version = packages.version("nvidia-ml-py")
    if version is None:
        return skipped("nvidia-ml-py is not installed")
    return passed(f"nvidia-ml-py {version}")


@check(
    "PY-05",
    "one NCCL library",
    why="torch may load another NCCL than the one it was built with, and ranks disagree or hang",
    expected="one version of libnccl.so",
    remedy=Remedy(
        bare_metal="unset {variables}; pip uninstall the NCCL wheel that torch did not ask for",
        docker="remove the other NCCL from the image, and from -e LD_LIBRARY_PATH, LD_PRELOAD",
    ),
)
def nccl_libraries(context: CheckContext) -> Finding:
    """Lists libnccl.so in torch, in the nvidia packages, on LD_LIBRARY_PATH and in LD_PRELOAD.

    The version of each is the text `NCCL version` inside the file. Two versions warn.
    """
    versions: dict[str, str] = {}
    files = list(dict.fromkeys(path.resolve() for path in _nccl_files(context)))
    if len(files) == 1:  # hundreds of megabytes: nothing to compare, so it is not read
        return passed(str(files[0]))
    for path in files:
        version = _nccl_version(path)
        if version:
            versions.setdefault(version, str(path))
    if not versions:
        return skipped("no NCCL library on this machine")
    if len(versions) == 1:
        return passed(f"NCCL {next(iter(versions))}")
    found = listing([f"{version} in {path}" for version, path in versions.items()])
    named = [
        name
        for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "VLLM_NCCL_SO_PATH")
        if context.environ.get(name)
    ]
    return warned(found, values={"variables": " ".join(named) or "LD_LIBRARY_PATH"})


def _nccl_files(context: CheckContext) -> Iterator[Path]:
    folders: list[Path] = []
    torch, nvidia = context.packages.folder("torch"), context.packages.folder("nvidia")
    if torch is not None:
        folders.append(torch / "lib")
    if nvidia is not None:
        folders += [nvidia / "nccl/lib", nvidia / "cu13/lib"]
    listed = context.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders += [context.files.path(folder) for folder in listed if folder.startswith("/")]
    for folder in folders:
        if folder.is_dir():
            yield from sorted(folder.glob("libnccl.so*"))
    preloaded = re.split(r"[ :]", context.environ.get("LD_PRELOAD", ""))
    for word in (*preloaded, context.environ.get("VLLM_NCCL_SO_PATH", "")):
        if "libnccl" in word and context.files.path(word).is_file():
            yield context.files.path(word)


def _nccl_version(path: Path) -> str | None:
    """The version that the library carries as text; None if it cannot be told."""
    try:
        with path.open("rb") as file:
            for chunk in iter(lambda: file.read(1 << 22), b""):
                match = re.search(rb"NCCL version (\d+\.\d+\.\d+)", chunk)
                if match:
                    return match[1].decode()
    except OSError:
        return None
    return None


CHECKS = (interpreter, required, torch_build, nvml_module, nccl_libraries)
