"""Attention heads that do not divide by the TP size: how many zero heads make them divide.

KV heads are replicated where the TP size is a multiple of their number; else zero heads are
appended, which change no result: their columns of the output projection are zero.
"""

from dataclasses import dataclass, replace

from vcli.topology.config import nearest_choices
from vcli.topology.errors import ConfigError
from vcli.topology.memory import tp_problem
from vcli.topology.model_spec import ModelSpec
from vcli.topology.sizes import ParallelSizes

#: Padding may at most multiply the KV bytes of a token by this.
MAX_KV_GROWTH = 2
#: TP sizes that a hint looks at.
_MAX_TP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPadding:
    """Heads before and after; equal where nothing is padded."""

    num_heads: int
    num_kv_heads: int
    padded_heads: int
    padded_kv_heads: int

    @property
    def is_padded(self) -> bool:
        """Whether there are zero heads at all."""
        return self.padded_heads != self.num_heads or self.padded_kv_heads != self.num_kv_heads

    @property
    def kv_growth(self) -> float:
        """KV bytes of a token on all ranks together, against those without padding."""
        return self.padded_kv_heads / self.num_kv_heads


def head_padding(spec: ModelSpec, tp: int) -> HeadPadding:
    """The heads that `tp` ranks hold together.

    Raises:
        ConfigError: padding would more than double the KV bytes.
    """
    padding = _padding(spec, tp)
    if padding.kv_growth <= MAX_KV_GROWTH:
        return padding
    raise ConfigError(
        f"{spec.num_kv_heads} KV heads on tensor parallel size {tp} would be padded to "
        f"{padding.padded_kv_heads}, more than {MAX_KV_GROWTH} times the KV cache",
        hint=_hint(spec, tp, enable_expert_parallel=False),
    )


def pad_heads(spec: ModelSpec, parallel: ParallelSizes) -> tuple[ModelSpec, HeadPadding]:
    """The model with heads that divide, and what was done for it.

    Raises:
        ConfigError: padding would more than double the KV bytes, or another size does not divide;
            the hint has the nearest TP sizes that padding can serve.
    """
    padding = head_padding(spec, parallel.tp)
    padded = _padded(spec, padding)
    expert = parallel.enable_expert_parallel
    problem = tp_problem(padded, parallel.tp, enable_expert_parallel=expert)
    if problem:
        hint = _hint(spec, parallel.tp, enable_expert_parallel=expert)
        raise ConfigError(problem, hint=hint)
    return padded, padding


def _padded(spec: ModelSpec, padding: HeadPadding) -> ModelSpec:
    return replace(spec, num_heads=padding.padded_heads, num_kv_heads=padding.padded_kv_heads)


def _hint(spec: ModelSpec, tp: int, *, enable_expert_parallel: bool) -> str:
    valid = []
    for size in range(1, _MAX_TP + 1):
        padding = _padding(spec, size)
        padded = _padded(spec, padding)
        problem = tp_problem(padded, size, enable_expert_parallel=enable_expert_parallel)
        if padding.kv_growth <= MAX_KV_GROWTH and not problem:
            valid.append(size)
    return f"--tensor-parallel-size: {nearest_choices(tp, valid)}"


def _padding(spec: ModelSpec, tp: int) -> HeadPadding:
    kv, per_kv = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    padded_kv = kv
    if tp % kv == 0:
        # Each KV head has copies; its query heads must divide among them.
        copies = tp // kv
        per_kv = -(-per_kv // copies) * copies
    else:
        padded_kv = -(-kv // tp) * tp
    return HeadPadding(
        num_heads=spec.num_heads,
        num_kv_heads=kv,
        padded_heads=padded_kv * per_kv,
        padded_kv_heads=padded_kv,
    )
