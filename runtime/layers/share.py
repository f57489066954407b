"""Which part of a checkpoint's rows, columns or heads a TP rank holds, and how many zeros.

The sizes come from the plan (`ModelSpec.cut`); here they are only dealt out.
"""

from dataclasses import dataclass

from vcli.runtime.distributed.group import GroupHandle
from vcli.topology.errors import ConfigError
from vcli.topology.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of `total` in the checkpoint, [start, start + count); then zeros up to `size`."""

    total: int
    start: int
    count: int
    size: int

    @property
    def source(self) -> slice:
        """What is read of the checkpoint's dimension."""
        return slice(self.start, self.start + self.count)

    def times(self, width: int) -> "Share":
        """The share of rows, where this one counts heads of `width` rows."""
        return Share(
            total=self.total * width,
            start=self.start * width,
            count=self.count * width,
            size=self.size * width,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShares:
    """The query and the KV heads of a rank, in heads."""

    query: Share
    kv: Share


def even_share(total: int, group: GroupHandle, what: str, *, padded: int | None = None) -> Share:
    """An equal run for each rank of `total`, or of what it is padded to.

    Raises:
        ConfigError: it does not divide.
    """
    size = _divide(padded or total, group, what)
    return _run(total, start=group.rank_in_group * size, size=size)


def head_shares(spec: ModelSpec, group: GroupHandle) -> HeadShares:
    """The heads of a rank: query heads in order, with the KV heads that they read.

    Fewer KV heads than ranks are replicated on neighbours.

    Raises:
        ConfigError: the heads do not divide, since the plan did not pad them.
    """
    cut = spec.cut
    size = _divide(cut.num_heads, group, "num_attention_heads")
    kv_size = _local_kv_heads(cut.num_kv_heads, group)
    first_kv = group.rank_in_group * cut.num_kv_heads // group.size
    kv = _run(spec.num_kv_heads, start=first_kv, size=kv_size)
    own_group = spec.num_heads // spec.num_kv_heads
    cut_group = cut.num_heads // cut.num_kv_heads
    first = group.rank_in_group * size
    if own_group == cut_group:
        return HeadShares(query=_run(spec.num_heads, start=first, size=size), kv=kv)
    # Zero heads stand at the end of each group: no head may move into another group.
    assert kv_size == 1, "groups grow only where KV heads are replicated"
    in_group = _run(own_group, start=first - first_kv * cut_group, size=size)
    query = Share(
        total=spec.num_heads,
        start=first_kv * own_group + in_group.start,
        count=in_group.count,
        size=size,
    )
    return HeadShares(query=query, kv=kv)


def _run(total: int, *, start: int, size: int) -> Share:
    start = min(start, total)
    return Share(total=total, start=start, count=min(size, total - start), size=size)


def _divide(total: int, group: GroupHandle, what: str) -> int:
    if total % group.size:
        raise ConfigError(
            f"{what}={total} cannot be divided among {group.size} tensor-parallel ranks",
            hint=f"choose a --tensor-parallel-size that divides {total}",
        )
    return total // group.size


def _local_kv_heads(num_kv_heads: int, group: GroupHandle) -> int:
    if num_kv_heads % group.size == 0:
        return num_kv_heads // group.size
    if group.size % num_kv_heads == 0:
        return 1
    raise ConfigError(
        f"num_key_value_heads={num_kv_heads} and {group.size} tensor-parallel ranks: neither "
        "divides the other",
        hint=f"choose a --tensor-parallel-size that divides {num_kv_heads} or is a multiple of it",
    )
