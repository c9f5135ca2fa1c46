"""Tests of the block pool: free queue, prefix-cache keys, reference counts, leaks."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.block_pool import BlockCounter, BlockPool, UnnumberedPool
from tests.core.reference_pool import PlainPool


def test_take_numbers_blocks_from_one_in_queue_order() -> None:
    pool = BlockPool(5)
    assert list(pool.take(7, 2)) == [1, 2]
    assert list(pool.take(8, 1)) == [3]
    assert list(pool.take(7, 1)) == [4]
    assert {i: list(table) for i, table in pool.tables.items()} == {7: [1, 2, 4], 8: [3]}
    assert (pool.free, pool.held(7), pool.held(8), pool.held(9)) == (1, 3, 1, 0)


def test_release_appends_blocks_to_free_queue_last_first() -> None:
    pool = BlockPool(4)
    pool.take(0, 3)
    pool.release(0)
    assert list(pool.take(1, 4)) == [4, 3, 2, 1]


def test_release_with_keyless_first_prepends_keyless_blocks() -> None:
    pool = BlockPool(6)
    pool.take(0, 4)
    pool.register(1, 100)
    pool.register(2, 200)
    pool.release(0, keyless_first=True)
    # blocks are freed from last to first: 4 and 3 have no key and go to the front; 2 and 1 go to
    # the back
    assert list(pool.take(1, 6)) == [4, 3, 5, 6, 2, 1]


def test_release_of_part_of_a_table_frees_last_block_first() -> None:
    pool = BlockPool(6)
    pool.take(0, 6)
    pool.release_head(0, 2)
    assert list(pool.tables[0]) == [3, 4, 5, 6]
    pool.release_at(0, [2, 0])  # order: block 5, then block 3
    assert list(pool.tables[0]) == [4, 6]
    assert pool.free_order() == (2, 1, 5, 3)
    pool.check()


def test_release_of_part_of_a_table_puts_keyless_blocks_first_if_asked() -> None:
    pool = BlockPool(5)
    pool.take(0, 5)
    pool.register(2, 200)
    pool.register(4, 400)
    pool.release_head(0, 2)  # without keyless_first, the key does not matter
    assert pool.free_order() == (2, 1)
    pool.release_at(0, [0, 1], keyless_first=True)  # block 3 has no key, block 4 has one
    assert pool.free_order() == (3, 2, 1, 4)
    pool.check()


def test_take_beyond_free_blocks_raises_and_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(0, 2)
    with pytest.raises(RuntimeError, match="2 blocks requested, 1 free"):
        pool.take(1, 2)
    assert pool.free == 1
    assert 1 not in pool.tables
    pool.check()


def test_release_of_unknown_owner_does_nothing() -> None:
    pool = BlockPool(2)
    pool.release(3)
    assert pool.free == 2
    pool.check()


def test_take_of_zero_blocks_creates_table() -> None:
    pool = BlockPool(2)
    assert list(pool.take(5, 0)) == []
    assert pool.held(5) == 0
    assert 5 in pool.tables


# Prefix cache


def test_freed_block_keeps_key_until_reallocation() -> None:
    pool = BlockPool(2)
    pool.take(0, 2)
    pool.register(1, 100)
    pool.release(0)  # free order: 2, 1
    assert list(pool.lookup([100])) == [1]
    assert (pool.free, pool.cached) == (2, 1)
    pool.take(1, 1)  # block 2, which has no key
    assert list(pool.lookup([100])) == [1]
    pool.take(1, 1)
    assert list(pool.lookup([100])) == []
    assert pool.cached == 0


def test_lookup_returns_longest_cached_prefix() -> None:
    pool = BlockPool(4)
    pool.take(0, 3)
    for block, key in ((1, 100), (2, 200), (3, 300)):
        pool.register(block, key)
    assert list(pool.lookup([100, 200, 300])) == [1, 2, 3]
    assert list(pool.lookup([100, 999, 300])) == [1]
    assert list(pool.lookup([200])) == [2]
    assert list(pool.lookup([])) == []


def test_lookup_prefers_earliest_block_of_a_key() -> None:
    pool = BlockPool(3)
    pool.take(0, 3)
    pool.register(2, 100)
    pool.register(1, 100)
    assert list(pool.lookup([100])) == [2]
    pool.release(0)  # free: 3, 2, 1
    pool.take(1, 2)  # 3 and 2
    assert list(pool.lookup([100])) == [1]


def test_block_keeps_first_key() -> None:
    pool = BlockPool(1)
    pool.take(0, 1)
    pool.register(1, 100)
    pool.register(1, 200)
    assert list(pool.lookup([100])) == [1]
    assert list(pool.lookup([200])) == []


def test_forgotten_block_loses_only_its_own_key() -> None:
    pool = BlockPool(3)
    pool.take(0, 3)
    for block, key in ((1, 100), (2, 100), (3, 300)):
        pool.register(block, key)
    pool.forget(1)
    assert list(pool.find([100, 300])) == [2, 3]
    pool.forget(2)
    pool.forget(2)  # has no key anymore
    assert list(pool.find([100, 300])) == [0, 3]
    assert pool.cached == 1


def test_share_counts_references_and_reuses_free_blocks() -> None:
    pool = BlockPool(3)
    pool.take(0, 2)
    pool.register(1, 100)
    pool.share(1, [1])  # in use: one more reference
    assert pool.free == 1
    pool.release(0)
    assert pool.free == 2
    assert not pool.is_free(1)
    pool.release(1)
    assert pool.is_free(1)
    pool.share(2, [1])  # free: leaves the free queue
    assert pool.free == 2
    assert list(pool.tables[2]) == [1]
    pool.check()


# Leaks and checks


def test_abandoned_blocks_stay_allocated() -> None:
    pool = BlockPool(4)
    pool.take(0, 3)
    pool.abandon(0)
    assert (pool.free, pool.held(0)) == (1, 0)
    pool.release(0)
    assert pool.free == 1
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check()


def test_check_detects_block_with_two_owners() -> None:
    pool = BlockPool(4)
    pool.take(0, 2)
    pool.tables[1] = array("i", [1])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check()
    pool.tables[1] = array("i", [3, 3])
    with pytest.raises(AssertionError, match="twice"):
        pool.check()


def test_fingerprint_is_free_count_without_cached_blocks() -> None:
    pool = BlockPool(4)
    pool.take(0, 1)
    first = pool.fingerprint()
    pool.release(0)
    pool.take(1, 1)  # another block and another owner: no difference without cached blocks
    assert pool.fingerprint() == first
    pool.register(2, 100)
    keyed = pool.fingerprint()
    assert keyed != first
    pool.release(1)
    pool.take(2, 1)
    assert pool.fingerprint() != keyed


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "share", "release", "front", "register"]),
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_invariants_hold_for_random_operations(moves: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(6)
    for move, owner, number in moves:
        if move == "take" and number <= pool.free:
            pool.take(owner, number)
        elif move == "share" and owner not in pool.tables:
            pool.share(owner, pool.lookup([number]))
        elif move == "register" and pool.held(owner):
            pool.register(pool.tables[owner][0], number)
        elif move in ("release", "front"):
            pool.release(owner, keyless_first=move == "front")
        pool.check()
        distinct = {block for table in pool.tables.values() for block in table}
        assert pool.free + len(distinct) == 6


# Pools that only count blocks


def test_block_counter_checks_allocations_and_frees() -> None:
    counter = BlockCounter(3)
    counter.take(0, 2)
    assert counter.free == counter.fingerprint() == 1
    with pytest.raises(RuntimeError, match="2 blocks requested, 1 free"):
        counter.take(1, 2)
    counter.take(1, 1)
    assert counter.free == 0
    counter.return_blocks(3)
    assert counter.free == 3
    counter.check()
    with pytest.raises(RuntimeError, match="1 blocks freed, 0 allocated"):
        counter.return_blocks(1)
    counter.free = 4
    with pytest.raises(AssertionError):
        counter.check()


@pytest.mark.parametrize("seed", range(20))
def test_pool_matches_reference_implementation(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([7, 30, 200])
    pool, plain = BlockPool(size), PlainPool(size)
    for _ in range(400):
        owner, count = draw.randrange(6), draw.choice([1, 2, draw.randint(0, size)])
        keys = array("q", range(first := draw.randrange(1, 4 * size), first + count))
        match draw.choice(["take", "take", "start", "release", "register", "register"]):
            case "take" if count <= pool.free:
                pool.take(owner, count)
                plain.take(owner, count)
            case "start" if owner not in pool.tables:
                hits = pool.lookup(keys)
                assert pool.count_unreferenced(hits) == sum(
                    1 for block in hits if not plain.held(block)
                )
                pool.share(owner, hits)
                plain.share(owner, plain.lookup(keys))
            case "release":
                keyless_first = draw.random() < 0.5
                pool.release(owner, keyless_first=keyless_first)
                plain.release(owner, keyless_first=keyless_first)
            case "register" if pool.held(owner):
                blocks = pool.tables[owner][: len(keys)]
                pool.register_all(blocks, keys[: len(blocks)])
                for block, key in zip(blocks, keys, strict=False):
                    plain.register(block, key)
        pool.check()
        assert list(pool._free) == plain.free
        assert {owner: list(table) for owner, table in pool.tables.items()} == plain.tables
        assert list(pool.lookup(keys)) == plain.lookup(keys)
        assert pool.cached == len(plain.key_of)


@given(
    st.lists(st.tuples(st.sampled_from("trat"), st.integers(0, 3), st.integers(0, 9)), max_size=30)
)
def test_unnumbered_pool_matches_counts_of_block_pool(
    calls: list[tuple[str, int, int]],
) -> None:
    pools: list[BlockPool] = [BlockPool(20), UnnumberedPool(20)]
    for what, owner, count in calls:
        for pool in pools:
            if what == "t" and count <= pool.free:
                pool.take(owner, count)
            elif what == "r":
                pool.release(owner)
            elif what == "a":
                pool.abandon(owner)
        counted = [(p.free, p.holdings(), p.held(owner), p.fingerprint(), p.cached) for p in pools]
        assert counted[0] == counted[1]
    with pytest.raises(RuntimeError, match="99 blocks requested"):
        pools[1].take(0, 99)


def test_take_in_turns_equals_single_takes() -> None:
    at_once, one_by_one = BlockPool(9), BlockPool(9)
    for pool in (at_once, one_by_one):
        for owner in (7, 8):
            pool.take(owner, 1)
        pool.take(9, 3)
        pool.register(4, 40)
        pool.release(9)
    at_once.take_in_turns([8, 7], 5)
    for owner in (8, 7, 8, 7, 8):
        one_by_one.take(owner, 1)
    assert at_once.fingerprint() == one_by_one.fingerprint()
    assert {owner: list(table) for owner, table in at_once.tables.items()} == {
        7: [1, 7, 9],
        8: [2, 6, 8, 5],
    }
    at_once.check()


def test_take_in_turns_needs_enough_blocks() -> None:
    pool = BlockPool(3)
    pool.take(1, 1)
    with pytest.raises(RuntimeError, match="3 blocks requested, 2 free"):
        pool.take_in_turns([1], 3)
    pool.take_in_turns([1], 0)
    assert pool.free == 2


def test_unused_keys_are_different_and_of_no_block() -> None:
    pool = BlockPool(3)
    pool.take(1, 2)
    pool.register(1, 5)
    assert pool.are_unused([])
    assert pool.are_unused([array("q", (4, 6)), array("q", (1000,))])
    assert not pool.are_unused([array("q", (4,)), array("q", (5,))])
    assert not pool.are_unused([array("q", (4,)), array("q", (6, 4))])
    pool.release(1)
    pool.take(2, 3)  # evicts the key of a cached block
    assert pool.are_unused([array("q", (5,))])
