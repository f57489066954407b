"""Sizes of a model that do not divide by the TP size: up to where zeros make them divide.

Heads: KV heads are replicated where the TP size is a multiple of their number; else whole groups
(a KV head with its query heads) of zeros are appended, so that each query head keeps its KV head:

    9 query and 3 KV heads, TP 2 or 4:   012 345 678 ___   12 and 4
    the same, TP 6 (two copies each):    01,2_ 34,5_ 67,8_   12 and 3, two query heads a rank

Rows of the vocabulary and columns of the MLPs: zeros at the end. No zero changes a result: what
reads one has a zero weight for it, and logits of rows that are no token are cut off.
"""

from dataclasses import dataclass, replace
from typing import Final

from vcli.topology.config import nearest_choices
from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import CutSizes, ModelSpec
from vcli.topology.sizes import ParallelSizes

#: Padding may at most multiply the KV bytes of a token by this.
MAX_KV_GROWTH: Final = 2
#: TP sizes that a hint looks at.
_MAX_TP: Final = 128
#: Where a share is padded at all, it becomes a multiple of this: 16 bytes of half precision, the
#: least that fast matrix kernels want.
_SHARE_MULTIPLE: Final = 8


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
        ConfigError: padding would more than double the KV bytes; the hint has the nearest TP sizes.
    """
    padding = _head_padding(spec, tp)
    if padding.kv_growth <= MAX_KV_GROWTH:
        return padding
    sizes = (size for size in range(1, _MAX_TP + 1) if can_cut_heads(spec, size))
    raise ConfigError(
        f"{spec.num_kv_heads} KV heads on tensor parallel size {tp} would be padded to "
        f"{padding.padded_kv_heads}, more than {MAX_KV_GROWTH} times the KV cache",
        hint=f"--tensor-parallel-size: {nearest_choices(tp, sizes)}",
    )


def can_cut_heads(spec: ModelSpec, tp: int) -> bool:
    """Whether `tp` ranks can share the heads, with padding that is not refused."""
    return _head_padding(spec, tp).kv_growth <= MAX_KV_GROWTH


def cut_sizes(spec: ModelSpec, parallel: ParallelSizes) -> CutSizes:
    """What the TP ranks share, padded where it does not divide: the one place that decides it.

    Raises:
        ConfigError: padding would more than double the KV bytes.
    """
    own, tp = spec.own_sizes, parallel.tp
    heads = head_padding(spec, tp)
    spreads_experts = parallel.enable_expert_parallel
    return CutSizes(
        num_heads=heads.padded_heads,
        num_kv_heads=heads.padded_kv_heads,
        intermediate_size=_shared(own.intermediate_size, tp)
        if spec.has_dense_mlp
        else own.intermediate_size,
        moe_intermediate_size=own.moe_intermediate_size
        if spreads_experts
        else _shared(own.moe_intermediate_size, tp),
        vocab_size=_shared(own.vocab_size, tp),
    )


def pad_model(spec: ModelSpec, parallel: ParallelSizes) -> ModelSpec:
    """The model as the layers are made: with `padded` where something does not divide.

    Raises:
        ConfigError: padding would more than double the KV bytes.
    """
    cut = cut_sizes(spec, parallel)
    return replace(spec, padded=None if cut == spec.own_sizes else cut)


def _shared(size: int, tp: int) -> int:
    if size % tp == 0:
        return size
    step = tp * _SHARE_MULTIPLE
    return -(-size // step) * step


def _head_padding(spec: ModelSpec, tp: int) -> HeadPadding:
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
