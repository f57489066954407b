"""What is true of this process, for the decisions on how it starts children."""

import ast
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from vcli.runtime.process.environ import OMP_NUM_THREADS, RAY_ADDRESS, first_number
from vcli.runtime.process.fork_safety import (
    cuda_user,
    has_stuck_libgomp,
    is_cuda_in_use,
    is_xpu_in_use,
    release_libgomp,
    thread_names,
)
from vcli.topology.facts import ProcessFacts


def process_facts(
    environ: Mapping[str, str], *, numa_bind: bool = False, wants_fork: bool = False
) -> ProcessFacts:
    """The facts of this process, now.

    With `wants_fork` OpenMP's idle threads are let go first, as before a fork: they are no reason
    against it, and come back when they are needed.
    """
    is_linux = sys.platform == "linux"
    if wants_fork and is_linux:
        release_libgomp()
    uses_cuda = is_linux and is_cuda_in_use()
    return ProcessFacts(
        platform=sys.platform,
        cuda_initialized=uses_cuda,
        cuda_initialized_by=cuda_user() if uses_cuda else None,
        xpu_initialized=is_xpu_in_use(),
        num_threads=len(thread_names()) if is_linux else 1,
        has_libgomp_pool=is_linux and has_stuck_libgomp(),
        in_ray_actor=is_in_ray_actor(),
        in_ray_placement_group=_is_in_placement_group(),
        numa_bind=numa_bind,
        is_wsl="microsoft" in platform.release().lower(),
        main_has_guard=main_has_guard(sys.modules.get("__main__")),
        omp_num_threads=first_number(environ.get(OMP_NUM_THREADS, "")),
    )


def is_in_ray_actor() -> bool:
    """Whether this process is an actor of Ray; false where Ray is not even imported."""
    ray = _started_ray()
    return ray is not None and ray.get_runtime_context().get_actor_id() is not None


def ray_environ() -> dict[str, str]:
    """What children of a Ray actor need to find its cluster; empty for everybody else."""
    ray = _started_ray()
    if ray is None or not is_in_ray_actor():
        return {}
    return {RAY_ADDRESS: str(ray.get_runtime_context().gcs_address)}


def main_has_guard(main: ModuleType | None) -> bool | None:
    """Whether the main module can be imported again; None where it is no file, or vcli's own.

    The file must have an `if __name__ == "__main__":`.
    """
    path = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    if path is None or (spec is not None and spec.name.startswith("vcli.")):
        return None
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # gone, or no Python source (a zip file, a compiled one)
    return any(isinstance(node, ast.If) and _is_main_test(node.test) for node in tree.body)


def _is_main_test(test: ast.expr) -> bool:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    values = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
    return "__name__" in names and "__main__" in values


def _is_in_placement_group() -> bool:
    ray = _started_ray()
    return ray is not None and ray.util.get_current_placement_group() is not None


def _started_ray() -> Any:
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
