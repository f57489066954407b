"""From free bytes on each rank to one number of blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcli.runtime.core.kv_config import plan_kv_cache, size_argument
from vcli.topology.errors import ConfigError, UnfitError, VcliError


def plan(available: list[int], per_block: list[int], **changes):
    options = {"block_size": 16, "max_model_len": 100, "max_num_seqs": 4, **changes}
    return plan_kv_cache(available, per_block, **options)


def test_rank_with_least_room_decides() -> None:
    assert plan([2000, 3000], [100, 200]).num_blocks == 15
    assert plan([2000, 3000], [100, 100]).num_blocks == 20


def test_more_than_can_ever_be_used_is_not_taken() -> None:
    assert plan([10**12], [100]).num_blocks == 4 * 7


def test_rank_without_attention_layers_sets_no_limit() -> None:
    assert plan([1000, 0], [100, 0]).num_blocks == 10


def test_exactly_one_sequence_is_enough() -> None:
    assert plan([700], [100]).num_blocks == 7


def test_measured_memory_that_is_too_small_names_rank_numbers_and_flags() -> None:
    with pytest.raises(UnfitError) as caught:
        plan([10_000, 699], [100, 100])

    assert "rank 1" in caught.value.message
    assert "max_model_len=100" in caught.value.message
    assert "6 blocks of 16 tokens" in caught.value.message
    assert "--max-model-len 96" in caught.value.hint


def test_size_given_by_the_user_that_is_too_small_is_the_users_error() -> None:
    with pytest.raises(ConfigError) as caught:
        plan([699], [100], requested_bytes=699)

    assert "--kv-cache-memory 700" in caught.value.hint
    assert "--max-model-len 96" in caught.value.hint


@pytest.mark.parametrize(
    ("num_bytes", "argument"),
    [(1, "1"), (10239, "10239"), (10241, "11K"), (45 * 2**20, "45M"), (13 * 2**30 + 1, "14G")],
)
def test_a_size_is_told_as_it_is_typed_and_never_too_small(num_bytes: int, argument: str) -> None:
    assert size_argument(num_bytes) == argument


def test_no_room_for_any_block_hints_at_no_shorter_context() -> None:
    with pytest.raises(UnfitError) as caught:
        plan([-5], [100])

    assert "--max-model-len" not in caught.value.hint


@given(
    st.lists(st.tuples(st.integers(-100, 10**6), st.integers(1, 1000)), min_size=1, max_size=5),
    st.integers(1, 64),
    st.integers(1, 500),
    st.integers(1, 8),
)
def test_every_rank_holds_the_planned_blocks_and_one_sequence_fits(
    ranks: list[tuple[int, int]], block_size: int, max_model_len: int, max_num_seqs: int
) -> None:
    available, per_block = [rank[0] for rank in ranks], [rank[1] for rank in ranks]
    try:
        kv = plan(
            available,
            per_block,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )
    except VcliError:
        needed = -(-max_model_len // block_size)
        assert any(room < needed * size for room, size in zip(available, per_block, strict=True))
        return
    assert kv.num_blocks * block_size >= max_model_len
    for room, size in zip(available, per_block, strict=True):
        assert kv.num_blocks * size <= room
