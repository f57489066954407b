"""Fills a model from a folder of safetensors files; each rank reads only the bytes it holds."""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vcli.runtime.checkpoint.safetensors_file import TensorEntry, read_header
from vcli.runtime.layers.norm import RMSNorm
from vcli.runtime.layers.weights import WeightSlice
from vcli.runtime.models.decoder import CausalLM
from vcli.runtime.models.weight_reader import PieceError, StoredWeight, read_weights
from vcli.topology.errors import ConfigError, ExitStatus, VcliError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
#: Spread of random weights; small enough that deep models do not overflow float16.
_DUMMY_STD = 0.02
_SHOWN_NAMES = 5


class WeightLoadError(VcliError):
    """The checkpoint does not have what the model needs; names file and tensor (exit 5)."""

    exit_status = ExitStatus.START_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What loading read on this rank. `unused` tensors are in the files and no rank wants them."""

    num_tensors: int
    num_bytes: int
    num_files: int
    seconds: float
    unused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    path: Path
    entry: TensorEntry


def load_weights(
    model: CausalLM, folder: Path, *, report: Callable[[float], None] = lambda fraction: None
) -> LoadReport:
    """Fills every parameter of `model`; `report` is told the fraction done at each percent.

    Everything is checked against the files' headers before the first byte of weights is read.

    Raises:
        WeightLoadError: a file is missing or damaged, a tensor is missing or has the wrong shape.
    """
    started = time.monotonic()
    weight_map = model.weight_map()
    stored = _stored_tensors(folder)
    _check(weight_map, stored, folder)
    wanted_parts = sorted(
        (
            StoredWeight(stored[weight.name].path, stored[weight.name].entry, weight)
            for weight in weight_map
        ),
        # In the order of the files, which is the fastest way through them.
        key=lambda part: (part.path, part.entry.begin_bytes),
    )
    progress = _Progress(sum(weight.num_elements for weight in weight_map), report)
    _read(wanted_parts, model.device, progress)
    model.finish_loading()
    wanted = {weight.name for weight in weight_map}
    return LoadReport(
        num_tensors=len(wanted),
        num_bytes=sum(
            weight.num_elements * _bytes_per_element(stored[weight.name].entry)
            for weight in weight_map
        ),
        num_files=len({part.path for part in wanted_parts}),
        seconds=time.monotonic() - started,
        unused=tuple(name for name in sorted(stored) if _is_unused(name, wanted, model)),
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by its index where there is one.

    Raises:
        WeightLoadError: there are none, some are missing, or the index is damaged.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        if (folder / SINGLE_NAME).is_file():
            return [folder / SINGLE_NAME]
        raise WeightLoadError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}",
            hint="name a folder with the safetensors files of the model",
        )
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightLoadError(
            f"{index} is no index of safetensors files: {error!r}",
            hint=f"download {INDEX_NAME} again",
        ) from error
    paths = [folder / str(name) for name in sorted(names)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise WeightLoadError(
            f"{index} names {len(paths)} files, {len(missing)} of them are missing: "
            f"{_some(missing)}",
            hint="finish the download of the model",
        )
    return paths


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to; None for the others."""
    layer = _LAYER.match(name)
    return None if layer is None else int(layer[1])


def init_dummy_weights(model: CausalLM, seed: int) -> None:
    """Random weights instead of a checkpoint: the same for the same seed, sizes and device."""
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        if id(parameter) in norms:
            parameter.fill_(1.0)
            continue
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device=device).manual_seed(seed)
        parameter.normal_(0.0, _DUMMY_STD, generator=generators[device])
    model.finish_loading()


class _Progress:
    """Turns elements into reports, one for each whole percent."""

    def __init__(self, total: int, report: Callable[[float], None]) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._percent = -1
        self._report = report

    def add(self, num_elements: int) -> None:
        self._done += num_elements
        percent = 100 * self._done // self._total
        if percent > self._percent:
            self._percent = percent
            self._report(self._done / self._total)


def _stored_tensors(folder: Path) -> dict[str, _StoredTensor]:
    """Every tensor of the checkpoint by name, from the headers of its files."""
    stored: dict[str, _StoredTensor] = {}
    for path in weight_files(folder):
        try:
            entries = read_header(path)
        except ConfigError as error:
            raise WeightLoadError(error.message, hint=error.hint) from error
        for entry in entries:
            stored[entry.name] = _StoredTensor(path, entry)
    return stored


def _check(
    weight_map: list[WeightSlice], stored: Mapping[str, _StoredTensor], folder: Path
) -> None:
    missing = sorted({weight.name for weight in weight_map if weight.name not in stored})
    if missing:
        raise WeightLoadError(
            f"the safetensors files in {folder} lack {len(missing)} tensors: {_some(missing)}",
            hint="config.json and the weights belong to different models, or a file is missing",
        )
    for weight in weight_map:
        path, entry = stored[weight.name].path, stored[weight.name].entry
        if entry.shape != weight.shape:
            raise WeightLoadError(
                f"{path}: {weight.name} has shape {list(entry.shape)}, "
                f"the model needs {list(weight.shape)}",
                hint="config.json and the weights belong to different models",
            )
        if entry.dtype not in _FLOAT_DTYPES:
            raise WeightLoadError(
                f"{path}: {weight.name} is stored as {entry.dtype}",
                hint="quantised weights are not supported; use a bfloat16 or float16 checkpoint",
            )


def _read(parts: list[StoredWeight], device: torch.device, progress: _Progress) -> None:
    try:
        read_weights(parts, device, on_elements=progress.add)
    except PieceError as error:
        raise WeightLoadError(
            str(error), hint=f"download or copy {error.path.name} again"
        ) from error
    except OSError as error:
        raise WeightLoadError(
            f"{error.filename} cannot be read: {error.strerror}",
            hint="look at its permissions, and at `ulimit -n`",
        ) from error


def _bytes_per_element(entry: TensorEntry) -> int:
    return {"F64": 8, "F32": 4}.get(entry.dtype, 2)


def _is_unused(name: str, wanted: set[str], model: CausalLM) -> bool:
    """Whether no rank of the model wants a tensor, and it isn't a leftover that is known."""
    if name in wanted or name.endswith("rotary_emb.inv_freq"):
        return False
    if name == "lm_head.weight":
        return False
    layer_index = layer_of(name)
    if layer_index is None:
        return name not in ("model.embed_tokens.weight", "model.norm.weight")
    start, end = model.layer_span
    return start <= layer_index < end or layer_index >= model.spec.num_layers


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown}, ..." if len(names) > _SHOWN_NAMES else shown
