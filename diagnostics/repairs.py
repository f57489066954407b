"""What `doctor --fix` does: only what cannot harm, only to what is vcli's own."""

from vcli.diagnostics.checks.leftovers import find_leftover_shm, is_own_shm
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.folders import cache_folders
from vcli.diagnostics.text import size_text


def repair(context: CheckContext) -> tuple[str, ...]:
    """Do the harmless repairs; one line for each thing that was done, or could not be.

    Removes files of vcli in /dev/shm that no process uses, and makes vcli's missing cache folder.
    """
    return (*_remove_own_shm(context), *_make_cache(context))


def _remove_own_shm(context: CheckContext) -> list[str]:
    done = []
    for name, size in find_leftover_shm(context.files).items():
        if not is_own_shm(name):
            continue
        path = f"/dev/shm/{name}"
        try:
            context.files.path(path).unlink()
        except OSError as error:
            done.append(f"could not remove {path}: {error.strerror}")
        else:
            done.append(f"removed {path} ({size_text(size)})")
    return done


def _make_cache(context: CheckContext) -> list[str]:
    own = next(
        folder
        for folder in cache_folders(context.environ, is_cuda=False)
        if folder.variable == "VCLI_HOME"
    )
    path = context.files.path(own.path)
    if path.is_dir():
        return []
    try:
        path.mkdir(parents=True)
    except OSError as error:
        return [f"could not make {own.path}: {error.strerror}"]
    return [f"made {own.path}"]
