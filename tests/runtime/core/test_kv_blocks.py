"""The block pool, the prefix cache and the manager, against models that cannot be wrong."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from vcli.runtime.core.block_pool import BlockPool
from vcli.runtime.core.kv_cache_manager import KVCacheManager
from vcli.runtime.core.prefix_cache import PrefixCache, extend_block_hashes
from vcli.runtime.core.request import Request
from vcli.runtime.messages import EngineRequest
from vcli.runtime.sampling_params import SamplingParams


class PoolMachine(RuleBasedStateMachine):
    """The free list as a plain list, the counts as a dict."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = list(range(num_blocks))
        self.counts = dict.fromkeys(range(num_blocks), 0)

    @rule(num_blocks=st.integers(0, 5))
    def take(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            with pytest.raises(ValueError, match="wanted"):
                self.pool.take(num_blocks)
            return
        expected, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert self.pool.take(num_blocks) == expected
        for block_id in expected:
            self.counts[block_id] = 1

    @rule(data=st.data())
    def hold(self, data) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.hold(block_id)
        if self.counts[block_id] == 0:
            self.free.remove(block_id)
        self.counts[block_id] += 1

    @precondition(lambda self: any(self.counts.values()))
    @rule(data=st.data(), keep_content=st.booleans())
    def release(self, data, keep_content: bool) -> None:
        held = [block_id for block_id, count in self.counts.items() if count]
        block_id = data.draw(st.sampled_from(held))
        self.pool.release(block_id, keep_content=keep_content)
        self.counts[block_id] -= 1
        if self.counts[block_id] == 0:
            self.free.insert(len(self.free) if keep_content else 0, block_id)

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_block_ids() == self.free
        assert self.pool.num_free == len(self.free)
        self.pool.check_integrity(list(self.counts.values()))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_releasing_a_free_block_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="free already"):
        pool.release(1, keep_content=True)


@pytest.mark.parametrize("expected", [[1, 0], [0, 1], [2, 0]])
def test_integrity_check_sees_a_wrong_count(expected: list[int]) -> None:
    pool = BlockPool(2)
    pool.take(1)
    if expected == [1, 0]:
        pool.check_integrity(expected)
        return
    with pytest.raises(RuntimeError):
        pool.check_integrity(expected)


def hashes_of(token_ids: list[int], block_size: int) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, len(token_ids) // block_size)
    return hashes


def test_hash_depends_on_everything_before_the_block() -> None:
    first = hashes_of([1, 2, 3, 4], 2)
    other = hashes_of([9, 2, 3, 4], 2)

    assert first[1] != other[1]
    assert first == hashes_of([1, 2, 3, 4, 5], 2)
    assert len(first[0]) == 32


def test_hash_of_moved_block_border_differs() -> None:
    assert hashes_of([1, 256], 2) != hashes_of([1, 2, 56], 2)
    assert hashes_of([1, 2], 1)[1] != hashes_of([1, 2], 2)[0]


def test_hash_of_a_partial_block_is_refused() -> None:
    with pytest.raises(ValueError, match="not full"):
        extend_block_hashes([], [1, 2, 3], 2, 2)


def test_cache_finds_the_longest_known_beginning_only() -> None:
    cache = PrefixCache()
    for name, block_id in ((b"a", 3), (b"b", 5), (b"d", 7)):
        cache.insert(name, block_id)

    assert cache.find([b"a", b"b", b"c", b"d"]) == [3, 5]
    cache.forget(3)
    assert cache.find([b"a", b"b"]) == []
    cache.check_integrity()


def test_first_block_with_a_hash_stays() -> None:
    cache = PrefixCache()
    cache.insert(b"a", 1)
    cache.insert(b"a", 2)

    assert cache.find([b"a"]) == [1]
    assert 2 not in cache
    cache.check_integrity()


def make_request(token_ids: list[int], number: int) -> Request:
    request = Request(
        EngineRequest(
            request_id=str(number), prompt_token_ids=token_ids, sampling=SamplingParams()
        ),
        max_model_len=1000,
    )
    request.number = number
    return request


def compute_all(manager: KVCacheManager, request: Request) -> None:
    request.num_computed_tokens = request.num_tokens
    manager.share_full_blocks(request)


def admit(manager: KVCacheManager, request: Request) -> list[int]:
    prefix = manager.find_prefix(request)
    manager.admit(request, prefix, request.num_tokens)
    return prefix


def test_equal_prompt_shares_its_full_blocks_but_leaves_a_token_to_compute() -> None:
    manager = KVCacheManager(16, 2, enable_prefix_caching=True)
    first, second = make_request([1, 2, 3, 4], 0), make_request([1, 2, 3, 4], 1)
    admit(manager, first)
    compute_all(manager, first)

    prefix = admit(manager, second)

    assert prefix == list(manager.block_table(first))[:1]
    assert set(manager.block_table(second)) & set(manager.block_table(first)) == set(prefix)
    manager.check_integrity()


def test_blocks_are_not_shared_before_they_are_confirmed() -> None:
    manager = KVCacheManager(16, 2, enable_prefix_caching=True)
    first = make_request([1, 2, 3, 4, 5], 0)
    admit(manager, first)
    first.num_computed_tokens = 5
    first.num_in_flight_tokens = 3

    manager.share_full_blocks(first)

    assert len(manager.find_prefix(make_request([1, 2, 3, 4, 5], 1))) == 1


def test_freed_prefix_is_found_until_its_blocks_are_taken_from_the_end() -> None:
    manager = KVCacheManager(4, 2, enable_prefix_caching=True)
    first = make_request([1, 2, 3, 4, 5, 6, 7], 0)
    admit(manager, first)
    compute_all(manager, first)
    manager.free(first)
    same = make_request([1, 2, 3, 4, 5, 6, 7], 1)
    assert len(manager.find_prefix(same)) == 3

    # The unfinished fourth block is worth nothing and goes first, then the end of the prefix.
    other = make_request([9, 9, 9, 9], 2)
    admit(manager, other)

    assert len(manager.find_prefix(same)) == 2
    manager.check_integrity()


def test_least_recently_freed_prefix_is_taken_first() -> None:
    manager = KVCacheManager(2, 2, enable_prefix_caching=True)
    old, recent = make_request([1, 2], 0), make_request([3, 4], 1)
    for request in (old, recent):
        admit(manager, request)
        compute_all(manager, request)
    manager.free(old)
    manager.free(recent)

    admit(manager, make_request([5, 6], 2))

    assert manager.find_prefix(make_request([1, 2, 0], 3)) == []
    assert len(manager.find_prefix(make_request([3, 4, 0], 4))) == 1


def test_admission_counts_idle_prefix_blocks_as_used_up() -> None:
    manager = KVCacheManager(4, 2, enable_prefix_caching=True)
    first = make_request([1, 2, 3, 4], 0)
    admit(manager, first)
    compute_all(manager, first)
    same = make_request([1, 2, 3, 4, 5], 1)
    prefix = manager.find_prefix(same)
    assert manager.blocks_to_admit(prefix, 5) == 1

    manager.free(first)

    assert manager.blocks_to_admit(prefix, 5) == 3


def test_extending_gives_only_what_is_missing_and_none_when_too_few_are_free() -> None:
    manager = KVCacheManager(3, 2, enable_prefix_caching=False)
    request = make_request([1, 2, 3], 0)
    admit(manager, request)

    assert manager.extend(request, 4) == []
    assert len(manager.extend(request, 5) or []) == 1
    assert manager.extend(request, 7) is None
    assert len(manager.block_table(request)) == 3
    manager.check_integrity()


def test_reset_forgets_prefixes_and_keeps_running_requests() -> None:
    manager = KVCacheManager(8, 2, enable_prefix_caching=True)
    first = make_request([1, 2, 3, 4], 0)
    admit(manager, first)
    compute_all(manager, first)

    assert manager.reset_prefix_cache() == 2

    assert manager.find_prefix(make_request([1, 2, 3, 4], 1)) == []
    manager.check_integrity()
    manager.free(first)
    assert manager.num_free_blocks == 8
