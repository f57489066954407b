"""The shape of the model that `topo` was given: from config.json, safetensors or GGUF headers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcli.topology import (
    ConfigError,
    ModelSpec,
    PlanWarning,
    model_spec_from_config,
    num_parameters,
)

#: Checkpoints may differ from the count by buffers that nobody loads.
_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoModel:
    """`checkpoint_parameters` counts the tensors of the weight files, None without any."""

    spec: ModelSpec
    name: str
    checkpoint_parameters: int | None = None
    warnings: tuple[PlanWarning, ...] = ()


def read_topo_model(model: str, cwd: Path, *, environ: Mapping[str, str]) -> TopoModel:
    """The shape of a local model, or of a Hub's that was downloaded; no weight is touched.

    Raises:
        ConfigError: no such file, or none that describes a model that vcli knows.
    """
    try:
        path = Path(cwd, model).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"model {model!r}: {error}", hint="name the whole path") from error
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path)
    from vcli.runtime.checkpoint.folder import is_folder

    if is_hub_name(model) and not path.exists():
        path = _downloaded(model, environ)
    config_path = path / "config.json" if is_folder(path) else path
    spec = model_spec_from_config(_read_config(config_path), source=str(config_path))
    folder = config_path.parent
    name = folder.resolve().name if config_path.name == "config.json" else config_path.stem
    if folder.parent.name == "snapshots":  # a folder of the Hub's cache has a commit's name
        name = folder.parent.parent.name.rpartition("--")[2]
    if not any(folder.glob("*.safetensors")):
        return TopoModel(spec=spec, name=name)
    return _with_headers(folder, spec, name)


def cached_snapshot(name: str, environ: Mapping[str, str]) -> Path | None:
    """The newest downloaded snapshot of a Hub model that has a config.json; None without one."""
    home = environ.get("HOME") or str(Path.home())
    cache = environ.get("HF_HOME") or (
        f"{environ.get('XDG_CACHE_HOME') or f'{home}/.cache'}/huggingface"
    )
    hub = Path(environ.get("HF_HUB_CACHE") or f"{cache}/hub")
    configs = list(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
    newest = max(configs, key=lambda path: path.lstat().st_mtime, default=None)
    return newest.parent if newest else None


def is_hub_name(typed: str) -> bool:
    """Whether this is `org/name` and no path of a file."""
    from vcli.runtime.checkpoint.hub import HUB_NAME

    return HUB_NAME.fullmatch(typed) is not None and not typed.endswith((".json", ".gguf"))


def _downloaded(name: str, environ: Mapping[str, str]) -> Path:
    folder = cached_snapshot(name, environ)
    if folder is None:
        raise ConfigError(
            f"model {name} is neither a folder here nor downloaded; topo downloads nothing",
            hint=f"hf download {name} config.json   and the same line again, or leave the model "
            "out to plan the sizes alone",
        )
    return folder


def _read_config(config_path: Path) -> dict[str, Any]:
    from vcli.runtime.checkpoint.regular import check_regular

    try:
        check_regular(config_path, hint="name a folder with config.json")
        config = json.loads(config_path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{config_path} does not exist",
            hint="topo reads the config.json of a local model folder, or a .gguf file; without a "
            "model it plans the sizes alone",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{config_path} cannot be read: {error}", hint="name a folder with config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(
            f"{config_path} is no valid JSON: {fault}", hint="download or copy it again"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{config_path} holds no JSON object", hint="download it again")
    return config


def _with_headers(folder: Path, spec: ModelSpec, name: str) -> TopoModel:
    """Compare the tensors in the headers of the weight files with what config.json describes."""
    from math import prod

    from vcli.runtime.checkpoint.folder import check_weights

    try:
        entries = check_weights(folder)
    except ConfigError as error:
        # The plan follows from config.json alone; serve will refuse the files.
        warning = PlanWarning(id="FIT-03", message=f"{error.message}; {error.hint}")
        return TopoModel(spec=spec, name=name, warnings=(warning,))
    held = sum(prod(entry.shape) for entry in entries)
    counted = num_parameters(spec)
    warnings: tuple[PlanWarning, ...] = ()
    if abs(held - counted) > _TOLERANCE * counted:
        message = (
            f"the weight files hold {held / 1e6:,.1f} M numbers, config.json describes "
            f"{counted / 1e6:,.1f} M: the bytes below may be wrong"
        )
        warnings = (PlanWarning(id="FIT-03", message=message),)
    return TopoModel(spec=spec, name=name, checkpoint_parameters=held, warnings=warnings)


def _from_gguf(path: Path) -> TopoModel:
    """The checkpoint that serve would convert the file to."""
    from vcli.runtime.checkpoint.gguf import converted_bytes
    from vcli.runtime.checkpoint.gguf_config import config_from_gguf, gguf_family
    from vcli.runtime.checkpoint.gguf_file import read_gguf
    from vcli.runtime.checkpoint.resolve import MAX_FLOAT32_BYTES

    file = read_gguf(path)
    is_small = converted_bytes(file, "float32") <= MAX_FLOAT32_BYTES
    config = config_from_gguf(file, gguf_family(file), dtype="float32" if is_small else "bfloat16")
    spec = model_spec_from_config(config, source=str(path))
    return TopoModel(spec=spec, name=path.stem)
