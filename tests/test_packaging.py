"""The wheel's package list is the folders, and metadata agrees with the code."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_code_is_packaged() -> None:
    listed = set(project()["tool"]["setuptools"]["packages"])
    found = {
        ".".join(("vcli", *path.parent.relative_to(ROOT).parts))
        for top in ("cli", "runtime", "topology", "diagnostics")
        for path in (ROOT / top).rglob("*.py")
    }
    assert listed == found


def test_every_package_has_a_docstring_file() -> None:
    for top in ("cli", "runtime", "topology", "diagnostics"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.parent


def test_constraints_pin_every_dependency() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    metadata = project()["project"]
    wanted = [*metadata["dependencies"], *metadata["optional-dependencies"]["dev"]]
    names = {
        requirement.split(";")[0].split(">")[0].split("=")[0].strip().lower().replace("_", "-")
        for requirement in wanted
    }
    assert names <= pinned, names - pinned
