# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""Who reads what in a step of decodes: contexts cut into splits of about the same length.

Lengths are on the device alone, and differ: with one program per context the longest would set the
pace, with a fixed number of splits most would be too short. So a kernel plans once per step, and
the attention of every layer follows: an item is a split of a request's context. A graph's grid has
room for the most items that there can be; the others are empty, and their programs leave.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.launch import ceil_div, pdl_options, wait_for_previous

#: Rows of `DecodePlan.work`. The first is the request: -1 for an item that is empty.
ROW, START, END, FIRST, COUNT = range(1, 6)
NUM_FIELDS = 6
NUM_WARPS = 4
#: Tokens of the smallest matrix tile.
MIN_TILE = 16
#: Requests of a program of the plan.
OWN = 16
#: Most splits of one context: a single program merges them.
MAX_SPLITS = 64
#: Heads that the tunings are for; larger ones get as much smaller tiles.
TUNED_HEAD_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """Tokens of a tile, warps, pipeline stages, fewest tokens of a split, programs to aim at."""

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3
    min_split_tokens: int = 128
    num_programs: int = 1056
    prefetches: bool = True
    """Whether the first tile is fetched while the kernel before it ends."""
    by_pages: bool = False
    """Whether `decode_hopper` attends, where it can; its tiles and warps are always the same."""

    def num_wanted(self, num_kv_heads: int) -> int:
        """Items that all contexts together are cut into, but for rounding up."""
        return max(self.num_programs // num_kv_heads, 1)


#: By the most pairs of a request and a kv head that they are for; measured on H200 within layers
#: with heads of 128. The last leaves contexts of one length whole where a program for each kv head
#: fills its 132 multiprocessors, else cuts them in two: never more programs than run at once.
FEW_PAIRS = 16
TUNINGS = (
    (FEW_PAIRS, DecodeTuning(tile=128, num_warps=4, num_stages=3, num_programs=1056)),
    (128, DecodeTuning(tile=32, num_warps=1, num_stages=4, num_programs=1056)),
)
MOST_TUNING = DecodeTuning(tile=64, num_warps=4, num_stages=3, num_programs=192)
#: For `decode_hopper`: a program for each multiprocessor, two where there are the fewest contexts.
FEW_PAGES_TUNING = DecodeTuning(tile=64, num_stages=3, num_programs=264, by_pages=True)
PAGES_TUNING = replace(FEW_PAGES_TUNING, num_programs=132)


def tuning_for(
    num_requests: int, num_kv_heads: int, head_size: int, *, by_pages: bool = False
) -> DecodeTuning:
    """The fastest known for so many contexts."""
    num_pairs = num_requests * num_kv_heads
    if by_pages:
        tuning = FEW_PAGES_TUNING if num_pairs <= FEW_PAIRS else PAGES_TUNING
        # Twice the head is twice the tile, and 3 of those do not fit into shared memory twice.
        return tuning if head_size <= TUNED_HEAD_SIZE else replace(tuning, num_stages=2)
    tuning = next((tuning for most, tuning in TUNINGS if num_pairs <= most), MOST_TUNING)
    if head_size <= TUNED_HEAD_SIZE:
        return tuning
    return replace(tuning, tile=max(tuning.tile * TUNED_HEAD_SIZE // head_size, MIN_TILE))


class DecodeWorkspace:
    """Plans and unmerged splits of up to `max_num_seqs` requests. One step at a time may use it."""

    def __init__(
        self,
        max_num_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        tuning: DecodeTuning | None = None,
        *,
        by_pages: bool = False,
    ) -> None:
        """Without `tuning` each number of requests has its own, for `decode_hopper` `by_pages`."""
        self.max_num_seqs = max_num_seqs
        self._num_kv_heads = num_kv_heads
        self._head_size = head_size
        self._tuning = tuning
        self._by_pages = by_pages
        most_items = max(self.num_items(count) for count in range(1, max_num_seqs + 1))
        self.work = torch.empty(NUM_FIELDS * most_items, dtype=torch.int32, device=device)
        self.partial = torch.empty(most_items * num_heads * head_size, device=device)
        self.partial_lse = torch.empty(most_items * num_heads, device=device)
        # Splits that have finished. Each launch leaves zeros behind.
        self.tickets = torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device)

    def tuning(self, num_requests: int) -> DecodeTuning:
        """What a step of so many requests uses."""
        return self._tuning or tuning_for(
            num_requests, self._num_kv_heads, self._head_size, by_pages=self._by_pages
        )

    def num_items(self, num_requests: int) -> int:
        """Most items of a step of so many requests: each may have one that is not full."""
        return num_requests + self.tuning(num_requests).num_wanted(self._num_kv_heads)

    def num_wanted(self, num_requests: int) -> int:
        """Full items to aim at."""
        return self.tuning(num_requests).num_wanted(self._num_kv_heads)

    def plan(self, num_requests: int) -> "DecodePlan":
        """An empty plan for so many requests."""
        assert num_requests <= self.max_num_seqs, f"{num_requests} requests"
        num_items = self.num_items(num_requests)
        return DecodePlan(
            workspace=self,
            num_requests=num_requests,
            tuning=self.tuning(num_requests),
            num_items=num_items,
            work=self.work[: NUM_FIELDS * num_items],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """The items of one step, once `plan_decode` filled it and until another plan is filled."""

    workspace: DecodeWorkspace
    num_requests: int
    tuning: DecodeTuning
    """What the items were cut for."""
    num_items: int
    """With the empty ones."""
    work: torch.Tensor
    """(6 * items) int32: request, row of its block table, tokens [start, end), its first item
    and how many it has."""


@triton.jit
def _cut(length, longest, TILE: tl.constexpr):
    """How many splits a context has, and tokens of each but the last: at most `longest`."""
    share = tl.cdiv(length, tl.maximum(tl.cdiv(length, longest), 1))
    share = tl.maximum(tl.cdiv(share, TILE) * TILE, TILE)
    return tl.maximum(tl.cdiv(length, share), 1), share


@triton.jit(
    do_not_specialize=["num_requests", "num_wanted", "num_items"],
    # A slice of a batch begins anywhere, and must not be a reason to compile.
    do_not_specialize_on_alignment=["rows", "seq_lens"],
)
def _plan_kernel(
    rows, seq_lens, work, num_requests, num_wanted, num_items,
    REQUESTS: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, ROW: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program cuts the contexts of `OWN` requests, and looks at all to find their places."""
    wait_for_previous(PDL)
    number = tl.program_id(0)
    other = tl.arange(0, REQUESTS)
    is_other = other < num_requests
    other_length = tl.load(seq_lens + other, mask=is_other, other=0)
    longest = tl.cdiv(tl.sum(other_length.to(tl.int64), axis=0), num_wanted).to(tl.int32)
    longest = tl.maximum(longest, tl.cdiv(tl.max(other_length, axis=0), MAX_SPLITS))
    longest = tl.maximum(tl.cdiv(longest, TILE) * TILE, MIN_SPLIT)
    other_count, other_share = _cut(other_length, longest, TILE)
    other_count = tl.where(is_other, other_count, 0)

    request = number * OWN + tl.arange(0, OWN)
    inside = request < num_requests
    length = tl.load(seq_lens + request, mask=inside, other=0)
    row = tl.load(rows + request, mask=inside, other=0)
    count, share = _cut(length, longest, TILE)
    count = tl.where(inside, count, 0)
    # Programs start in the order of the items: the longest first, so that none of them is last.
    is_longer = other_share[None, :] > share[:, None]
    is_equal = other_share[None, :] == share[:, None]
    is_before = is_longer | (is_equal & (other[None, :] < request[:, None]))
    first = tl.sum(tl.where(is_before, other_count[None, :], 0), axis=1)
    for split in range(tl.max(count, axis=0)):
        has_it = split < count
        item = work + first + split
        start = split * share
        tl.store(item, request, mask=has_it)
        tl.store(item + ROW * num_items, row, mask=has_it)
        tl.store(item + START * num_items, start, mask=has_it)
        tl.store(item + END * num_items, tl.minimum(start + share, length), mask=has_it)
        tl.store(item + FIRST * num_items, first, mask=has_it)
        tl.store(item + COUNT * num_items, count, mask=has_it)
    begin = tl.sum(other_count, axis=0) + number * REQUESTS
    for begin_empty in range(begin, num_items, REQUESTS * tl.num_programs(0)):
        tl.store(work + begin_empty + other, -1, mask=begin_empty + other < num_items)


def _room(num_requests: int) -> int:
    """16, 64, 256, 1024, ...: few sizes, since each is compiled."""
    return max(16, 1 << (-(-(num_requests - 1).bit_length() // 2) * 2))


def plan_decode(plan: DecodePlan, rows_R: torch.Tensor, seq_lens_R: torch.Tensor) -> None:
    """Fill `plan` for requests with these rows of the block tables and context lengths (int32).

    A length has the token of this step in it; 0 is padding. Does not wait for the device. Layers
    read the plan before they wait: a kernel that does not overlap must come between.
    """
    if not plan.num_requests:
        return
    workspace, tuning = plan.workspace, plan.tuning
    _plan_kernel[(ceil_div(plan.num_requests, OWN),)](
        rows_R, seq_lens_R, plan.work, plan.num_requests,
        workspace.num_wanted(plan.num_requests), plan.num_items,
        REQUESTS=_room(plan.num_requests),
        OWN=OWN,
        MAX_SPLITS=MAX_SPLITS,
        TILE=tuning.tile,
        MIN_SPLIT=-(-tuning.min_split_tokens // tuning.tile) * tuning.tile,
        ROW=ROW,
        START=START,
        END=END,
        FIRST=FIRST,
        COUNT=COUNT,
        num_warps=NUM_WARPS,
        **pdl_options(),
    )  # fmt: skip
