"""FIT: the model against the plan and the machine; reads config.json and nothing larger."""

from collections.abc import Iterator
from typing import Final

from vcli.diagnostics.check import (
    Finding,
    Level,
    Remedy,
    check,
    failed,
    passed,
    skipped,
)
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.text import listing
from vcli.topology import ConfigError, ModelSpec, ParallelConfig, check_model_fits

NO_MODEL: Final = "no model was named (--model)"
_MAX_SHOWN: Final = 8


@check(
    "FIT-01",
    "config.json can be served",
    level=Level.L1,
    why="without it nobody knows the layers",
    expected="a supported architecture, without options that change the computation",
    remedy=Remedy(bare_metal="{hint}"),
    is_preflight=True,
    is_headline=True,
)
def readable_config(context: CheckContext) -> Finding:
    """Reads config.json as the start does: architecture, sizes, unsupported options."""
    model = context.model
    if model is None:
        return skipped(NO_MODEL)
    if model.problem is not None:
        return failed(
            model.problem.message,
            remedy=model.problem.hint or "name another model",
            is_typed=True,
        )
    if model.spec is None:
        return skipped(f"{model.typed} is not on this machine yet")
    spec = model.spec
    return passed(f"{spec.architecture}, {spec.num_layers} layers, {spec.dtype}")


@check(
    "FIT-02",
    "sizes fit the model",
    level=Level.L1,
    why="a rank must hold whole heads, and each stage at least one layer",
    expected="sizes by which heads, KV heads, MLP, vocabulary, experts and layers can be cut",
    remedy=Remedy(bare_metal="{flags}"),
    requires=("FIT-01",),
    is_preflight=True,
)
def divisibility(context: CheckContext) -> Finding:
    """Applies the rules by which the layers are cut to the typed sizes.

    A failure lists the sizes that fit the same number of ranks, largest tensor parallelism first.
    """
    model, config = context.model, context.plan.config
    if model is None or model.spec is None:
        return skipped(NO_MODEL)
    try:
        check_model_fits(model.spec, config)
    except ConfigError as error:
        sizes = list(_fitting_sizes(model.spec, config))
        return failed(
            error.message,
            expected=f"one of: {listing(sizes, limit=_MAX_SHOWN)}" if sizes else "",
            remedy=sizes[0] if sizes else error.hint,
            is_typed=True,
        )
    return passed(
        f"{model.spec.num_heads} heads, {model.spec.num_kv_heads} KV heads and "
        f"{model.spec.num_layers} layers over tp {config.tp}, pp {config.pp}"
    )


def _fitting_sizes(spec: ModelSpec, config: ParallelConfig) -> Iterator[str]:
    """Flags of the sizes that use as many ranks, or else the most below; largest TP first."""
    replicas = f" -dp {config.dp}" if config.dp > 1 else ""
    for ranks in range(config.world_size, 0, -1):
        found = [
            f"-tp {tp}" + (f" -pp {ranks // tp}" if ranks > tp else "") + replicas
            for tp in range(ranks, 0, -1)
            if ranks % tp == 0 and _can_be_cut(spec, config, tp=tp, pp=ranks // tp)
        ]
        if found:
            yield from found
            return


def _can_be_cut(spec: ModelSpec, config: ParallelConfig, *, tp: int, pp: int) -> bool:
    try:
        sizes = config.resized(tp=tp, pp=pp, dp=config.dp, expert=config.enable_expert_parallel)
        check_model_fits(spec, sizes)
    except ConfigError:
        return False
    return True


CHECKS = (readable_config, divisibility)
