"""Fences: who may import whom, what stays free of torch, how long a file may get."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cli", "runtime", "topology", "diagnostics")

# From the top; a package may import what stands below it, never its neighbours on a line.
RUNTIME_LAYERS: tuple[tuple[str, ...], ...] = (
    ("bench",),
    ("launch",),
    ("server",),
    ("engine",),
    ("core",),
    ("executor",),
    ("worker",),
    ("models",),
    ("layers",),
    ("distributed",),
    ("ipc", "process"),
    ("checkpoint",),
    ("messages",),
    ("sampling_params",),
    ("config",),
    ("memory_limits",),
    ("errors", "exit_status", "log"),
)
ALLOWED_TOP = {
    "cli": {"cli", "runtime", "diagnostics", "topology"},
    "runtime": {"runtime", "topology"},
    "diagnostics": {"diagnostics", "topology"},
    "topology": {"topology"},
}
TORCH_FREE = (
    "topology",
    "diagnostics",
    "cli",
    "runtime/checkpoint",
    "runtime/ipc",
    "runtime/process",
    "runtime/core",
    "runtime/executor",
    "runtime/engine",
    "runtime/server",
    "runtime/launch",
    "runtime/bench",
)


def source_files() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(("vcli", *parts))


def imports_of(path: Path) -> Iterator[str]:
    """Every vcli module named by an import, lazy and type-only ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vcli"):
            for alias in node.names:
                candidate = f"{node.module}.{alias.name}"
                yield candidate if is_module(candidate) else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("vcli"))


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split(".")[1:])
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def runtime_level(name: str) -> int | None:
    parts = name.split(".")
    if len(parts) < 3:
        return None
    for level, names in enumerate(RUNTIME_LAYERS):
        if parts[2] in names:
            return level
    raise AssertionError(f"{name} stands in no layer of RUNTIME_LAYERS")


def test_packages_import_only_what_is_below_them() -> None:
    wrong = [
        f"{module_name(path)} imports {target}"
        for path in source_files()
        for target in imports_of(path)
        if target.split(".")[1] not in ALLOWED_TOP[path.relative_to(ROOT).parts[0]]
    ]
    assert wrong == []


def test_runtime_layers_import_only_what_is_below_them() -> None:
    wrong = []
    for path in (ROOT / "runtime").rglob("*.py"):
        own = module_name(path)
        for target in imports_of(path):
            if (
                not target.startswith("vcli.runtime.")
                or own.split(".")[2:3] == target.split(".")[2:3]
            ):
                continue
            own_level, target_level = runtime_level(own), runtime_level(target)
            if own_level is None or target_level is None or target_level <= own_level:
                wrong.append(f"{own} imports {target}")
    assert wrong == []


def test_no_import_cycle_counting_lazy_imports() -> None:
    graph = {module_name(path): set(imports_of(path)) for path in source_files()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            if target != name:
                visit(target, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_topology_needs_the_standard_library_alone() -> None:
    for path in (ROOT / "topology").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                root = name.split(".")[0]
                assert root == "vcli" or root in sys.stdlib_module_names, f"{path}: {name}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_package_imports_without_torch_and_transformers(package: str) -> None:
    modules = [module_name(path) for path in sorted((ROOT / package).rglob("*.py"))]
    modules = [name for name in modules if not name.endswith("__main__")]
    script = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--help"], ("torch", "transformers", "fastapi", "ray", "numpy")),
        (["serve", "--help"], ("torch", "transformers", "fastapi", "ray", "numpy")),
        (["topo", "-tp", "2"], ("torch", "transformers", "fastapi", "ray", "numpy")),
    ],
)
def test_command_loads_no_heavy_module(arguments: list[str], forbidden: tuple[str, ...]) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['vcli', *{arguments!r}]\n"
        "from vcli.cli.main import main\n"
        "from vcli.cli.environment import Environment\n"
        "status = main(Environment.of_this_process())\n"
        f"loaded = [name for name in {forbidden!r} if name in sys.modules]\n"
        "print('LOADED', loaded, status, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "LOADED [] 0" in done.stderr, done.stderr[-2000:]


def test_no_file_is_longer_than_350_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in source_files()
        if (lines := len(path.read_text().splitlines())) > 350
    }
    assert long == {}


def test_no_function_is_longer_than_60_lines() -> None:
    long = []
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60 and not _is_flag_list(path, node):
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {length}")
    assert long == []


def _is_flag_list(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command's signature lists every flag; what counts there is its body."""
    body = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
    return path.parent.name == "commands" and body <= 60


def test_tensor_parallel_size_is_named_in_few_files() -> None:
    naming = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if "tensor_parallel_size" in path.read_text()
    ]
    assert len(naming) <= 6, naming


def test_no_module_level_mutable_state_through_global() -> None:
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Global), f"{path}:{node.lineno}"
