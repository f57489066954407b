"""Whether a local folder is a checkpoint that vcli can serve; told before anything is loaded."""

from pathlib import Path
from typing import Any

from vcli.runtime.checkpoint.expected import check_tensors
from vcli.runtime.checkpoint.regular import check_regular
from vcli.runtime.checkpoint.safetensors_file import TensorEntry, read_header
from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import ModelSpec, model_spec_from_config

INDEX_NAME = "model.safetensors.index.json"
#: files that are read where they are there
_OPTIONAL_NAMES = (
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
_SHOWN_LETTERS = 100


def check_folder(
    folder: Path, *, needs_weights: bool = True, needs_tokenizer: bool = True
) -> ModelSpec:
    """The model's shape, after a check that config, tokenizer and every weight file can be read.

    Opens no weights. What is not needed may be missing.

    Raises:
        ConfigError: the first thing that is wrong, with the path.
    """
    if not is_folder(folder):
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigError(
            f"model folder {folder} {kind}",
            hint="name a folder with config.json, tokenizer.json and *.safetensors",
        )
    config_path = folder / "config.json"
    config = _read_json_object(config_path, hint=_config_hint(folder))
    spec = model_spec_from_config(config, source=str(config_path))
    for path in weight_files(folder) if needs_weights else ():
        _read_start(path, hint=f"download or copy {path.name} again, or mend its permissions")
    tokenizer_path = folder / "tokenizer.json"
    if needs_tokenizer:
        _read_json_object(
            tokenizer_path,
            hint="copy tokenizer.json from the original model; from a slow tokenizer it is made by "
            f'python -c "from transformers import AutoTokenizer as A; '
            f"A.from_pretrained('{folder}').save_pretrained('{folder}')\"",
        )
    for name in _OPTIONAL_NAMES:
        if _exists(folder / name):
            check_regular(folder / name, hint=f"remove {name}, or copy it again")
    return spec


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder.

    Raises:
        ConfigError: no such path can be, or it lies where this user may not look.
    """
    try:
        return path.is_dir()
    except OSError as error:
        shown = (
            str(path) if len(str(path)) <= _SHOWN_LETTERS else f"{str(path)[:_SHOWN_LETTERS]}..."
        )
        raise ConfigError(
            f"{shown} cannot be looked at: {error.strerror}", hint="check the path"
        ) from error


def check_weights(folder: Path, spec: ModelSpec | None = None) -> tuple[TensorEntry, ...]:
    """The tensors of the checkpoint, after a check that no weight file is cut short.

    Reads the headers only. With `spec`, they are the tensors that such a model has.

    Raises:
        ConfigError: a file is missing, cut short or no safetensors file, holds other tensors
            than the index says, or lacks one of the model's; names file and tensor.
    """
    found = {path.name: read_header(path) for path in weight_files(folder)}
    for tensor, file_name in _weight_map(folder).items():
        if tensor not in {entry.name for entry in found[file_name]}:
            raise ConfigError(
                f"{folder / file_name} lacks {tensor}, which {INDEX_NAME} places there",
                hint=f"download or copy {file_name} and {INDEX_NAME} again",
            )
    if spec is not None:
        check_tensors(spec, found, folder)
    return tuple(entry for entries in found.values() for entry in entries)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files to load: those of the index, else every one in the folder.

    Raises:
        ConfigError: there is none, or one that the index names is missing.
    """
    named = sorted(set(_weight_map(folder).values()))
    missing = [name for name in named if not _exists(folder / name)]
    if missing:
        raise ConfigError(
            f"{folder} lacks {missing[0]}, one of {len(missing)} missing of the {len(named)} "
            f"weight files that {INDEX_NAME} names",
            hint=f"download or copy {' '.join(missing)} into {folder}",
        )
    files = tuple(folder / name for name in named) or tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise ConfigError(f"{folder} holds no *.safetensors", hint=_no_weights_hint(folder))
    return files


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no file can have such a name
        return False


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file name, from the index; empty without one."""
    index_path = folder / INDEX_NAME
    if not _exists(index_path):
        return {}
    hint = f"download or copy {INDEX_NAME} again"
    weight_map = _read_json_object(index_path, hint=hint).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index_path} has no weight_map", hint=hint)
    names = {str(tensor): str(file_name) for tensor, file_name in weight_map.items()}
    for tensor, name in names.items():
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(
                f"{index_path} places {tensor} in {name!r}, outside of the model's folder",
                hint=hint,
            )
    return names


def _config_hint(folder: Path) -> str:
    for path in sorted(folder.glob("*.gguf")):
        return f"the folder holds a GGUF file, name that: vcli serve {path}"
    for path in sorted(folder.glob("snapshots/*/config.json")):
        return f"this looks like a hub cache, name the snapshot: vcli serve {path.parent}"
    return "name the folder that holds config.json, or download the model again"


def _no_weights_hint(folder: Path) -> str:
    for pattern in ("*.bin", "*.pth", "*.pt"):
        for path in sorted(folder.glob(pattern)):
            return (
                f"{path.name} is a pickle, which vcli does not load; get the safetensors version "
                "of the model"
            )
    return "download the weights again (model.safetensors, or its parts with their index)"


def _read_json_object(path: Path, *, hint: str) -> dict[str, Any]:
    import msgspec

    _read_start(path, hint=hint)
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(
            f"{path} is not valid JSON: {fault}", hint=f"download or copy {path.name} again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", hint=f"download {path.name} again")
    return value


def _read_start(path: Path, *, hint: str) -> None:
    try:
        check_regular(path, hint=hint)
        with path.open("rb") as file:
            start = file.read(8)
    except FileNotFoundError as error:
        fault = f"is a link to {path.readlink()}, which" if path.is_symlink() else ""
        raise ConfigError(f"{path} {fault} does not exist".replace("  ", " "), hint=hint) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    if start == b"version ":
        raise ConfigError(f"{path} is a git-lfs pointer, not the file", hint="git lfs pull")
