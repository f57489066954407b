"""ENV: whether a model of the Hub can be had."""

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, skipped
from vcli.diagnostics.context import CheckContext

_ON = ("1", "ON", "TRUE", "YES")


@check(
    "ENV-06",
    "the model can be had offline",
    why="a start that may not download ends when the first file is missing",
    expected="the model in the cache of this machine, or downloads allowed",
    remedy=Remedy(
        bare_metal="HF_HUB_OFFLINE=0 hf download {name}   on every node, or copy the cache there",
        docker="docker run -v ~/.cache/huggingface:/root/.cache/huggingface …   (with the model)",
        kubernetes="mount a volume that holds the model, and name its folder",
    ),
)
def offline(context: CheckContext) -> Finding:
    """With HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE set, looks for the named model in the cache."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    is_offline = any(context.environ.get(name, "").upper() in _ON for name in names)
    model = context.model
    if model is None or not model.is_hub_name:
        return skipped("no Hub name was given")
    if model.folder is not None:
        return passed(f"{model.typed} is in the cache")
    if is_offline:
        return failed(
            f"{model.typed} is not in the cache, and downloads are off",
            values={"name": model.typed},
        )
    return passed(f"{model.typed} will be downloaded at the start")


CHECKS = (offline,)
