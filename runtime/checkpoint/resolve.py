"""From what the user typed as MODEL to a checked local folder."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vcli.runtime.checkpoint.cache import ensure_cached, models_folder, user_home
from vcli.runtime.checkpoint.demo import CONVERSION, SMOLLM2, ensure_demo_model
from vcli.runtime.checkpoint.folder import check_folder, is_folder
from vcli.runtime.checkpoint.gguf import convert_gguf, converted_bytes
from vcli.runtime.checkpoint.gguf_config import gguf_family
from vcli.runtime.checkpoint.gguf_file import GgufFile, read_gguf
from vcli.runtime.checkpoint.hub import HUB_NAME, download_from_hub
from vcli.runtime.checkpoint.safetensors_file import CheckpointDtype
from vcli.topology.errors import ConfigError, UnfitError
from vcli.topology.model_spec import ModelSpec

#: a GGUF whose float32 weights are larger than this is converted to bfloat16
MAX_FLOAT32_BYTES = 8 << 30
#: tokenizer and JSON files beside the weights
TOKENIZER_BYTES = 32 << 20
#: of a GGUF's name in the name of its cached folder, which gets prefixes and suffixes
MAX_STEM_LETTERS = 48

ModelSource = Literal["demo", "folder", "gguf", "hub"]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A folder with config.json, tokenizer.json and *.safetensors; `name` is the served name."""

    path: Path
    name: str
    spec: ModelSpec
    source: ModelSource


def resolve_model(
    model: str | None,
    *,
    environ: Mapping[str, str],
    report: Report,
    revision: str | None = None,
    needs_weights: bool = True,
    needs_tokenizer: bool = True,
) -> ResolvedModel:
    """The folder that `model` stands for, downloaded or converted if that is needed.

    None is the embedded demo; else a folder, a .gguf file, or a hub name `org/name`; what exists
    here goes before the hub. Blocks, for minutes where something is large; `report` gets a line
    for each step. Weight files are not opened: see `check_weights`. A folder may lack what is not
    needed.

    Raises:
        ConfigError: nothing of the kind, or a checkpoint that vcli cannot serve.
        UnfitError: a download failed, or the cache cannot be written.
    """
    if model is None:
        path = ensure_demo_model(environ, report=report)
        return _converted(path, name=SMOLLM2.name, source="demo")
    path = _expanded(model, environ)
    if model and is_folder(path):
        spec = check_folder(path, needs_weights=needs_weights, needs_tokenizer=needs_tokenizer)
        return ResolvedModel(path=path, name=path.resolve().name, spec=spec, source="folder")
    if path.suffix.lower() == ".gguf":
        return _converted(_ensure_gguf(path, environ, report), name=path.stem, source="gguf")
    if not path.exists() and HUB_NAME.fullmatch(model):
        folder = download_from_hub(model, revision=revision, environ=environ, report=report)
        spec = check_folder(folder)
        return ResolvedModel(path=folder, name=model, spec=spec, source="hub")
    raise _no_model(model, path)


def _expanded(model: str, environ: Mapping[str, str]) -> Path:
    if model == "~" or model.startswith("~/"):
        return user_home(environ) / model[2:]
    return Path(model)


def _no_model(model: str, path: Path) -> ConfigError:
    if model and path.is_file():
        is_weights = path.suffix == ".safetensors"
        wanted = "config.json, tokenizer.json and *.safetensors, or a .gguf file"
        return ConfigError(
            f"model {model!r} is a file, not a folder or .gguf file",
            hint=f"name its folder: vcli serve {path.parent}"
            if is_weights
            else f"name a folder with {wanted}",
        )
    return ConfigError(
        f"model {model!r} is no folder or .gguf file here, nor a hub name of the form org/name",
        hint="check the path, or leave the model out to serve the embedded demo",
    )


def _converted(path: Path, *, name: str, source: ModelSource) -> ResolvedModel:
    """A folder of our own cache: damage to it is not the user's mistake, and it can be remade."""
    try:
        spec = check_folder(path)
    except ConfigError as error:
        raise UnfitError(
            f"the converted model in the cache is damaged: {error.message}",
            hint=f"remove it, the next start makes it again: rm -r {path}",
        ) from error
    return ResolvedModel(path=path, name=name, spec=spec, source=source)


def _ensure_gguf(path: Path, environ: Mapping[str, str], report: Report) -> Path:
    """The converted folder of the GGUF file `path`.

    The key is the file's identity, not a hash of its content, which would read tens of gigabytes
    at each start: path, size, inode and both times. The time of the last status change
    is there for a file overwritten in place by a tool that restores the modification time.
    """
    file = read_gguf(path)
    gguf_family(file)
    status = path.stat()
    facts = (
        *(str(path.resolve()), status.st_size, status.st_dev, status.st_ino),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )
    identity = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
    dtype = _dtype_for(file)

    def build(building: Path, kept: Path) -> None:
        del kept
        report(f"converting {path.name} to {dtype} safetensors, this happens once")
        convert_gguf(path, building, dtype=dtype, report=report)

    return ensure_cached(
        models_folder(environ) / f"{path.stem[:MAX_STEM_LETTERS]}-{identity}-c{CONVERSION}",
        title=f"the model {path.stem}",
        needed_bytes=converted_bytes(file, dtype) + TOKENIZER_BYTES,
        build=build,
        report=report,
    )


def _dtype_for(file: GgufFile) -> CheckpointDtype:
    return "float32" if converted_bytes(file, "float32") <= MAX_FLOAT32_BYTES else "bfloat16"
