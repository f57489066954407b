"""`vcli version`."""

from importlib import metadata
from platform import python_version

import typer

from vcli.cli.options import AsJson
from vcli.cli.output import Output

_LIBRARIES = (
    "torch",
    "tokenizers",
    "safetensors",
    "fastapi",
    "uvicorn",
    "flashinfer-python",
    "ray",
)


def version(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the versions of vcli and of the libraries it runs on (nothing is imported)."""
    output = Output(context.obj, json_mode=as_json)
    found = {"vcli": _installed("vcli-toolkit"), "python": python_version()}
    found |= {name: _installed(name) for name in _LIBRARIES}
    if as_json:
        output.document("vcli.version/1", {"versions": found})
        return
    for name, number in found.items():
        output.result(f"{name:<18} {number or 'not installed'}")


def show_version(context: typer.Context) -> None:
    """One line, for `vcli --version`."""
    Output(context.obj).result(f"vcli {_installed('vcli-toolkit') or 'unknown'}")


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
