"""From the name of a model to a local folder of safetensors: folders, GGUF files, hub, demo."""

from vcli.runtime.checkpoint.folder import check_folder, check_weights
from vcli.runtime.checkpoint.gguf import convert_gguf
from vcli.runtime.checkpoint.resolve import ResolvedModel, resolve_model

__all__ = ["ResolvedModel", "check_folder", "check_weights", "convert_gguf", "resolve_model"]
