"""Tests of blocks in host memory: writes, reads and eviction."""

from __future__ import annotations

import pytest

from simkv.schedulers.vllm.host_block_store import HostBlockStore
from simkv.schedulers.vllm.host_eviction import BlockUses
from simkv.schedulers.vllm.versions import find_rules

RULES = find_rules("0.33")


def stored(store: HostBlockStore, *keys: int) -> BlockUses:
    """Write these blocks to host memory for a request, and end the request."""
    uses = BlockUses()
    assert store.write(keys, 0, uses) == list(keys)
    store.complete_write(keys)
    store.over(uses)
    return uses


def read(store: HostBlockStore, *keys: int) -> None:
    """Read these blocks from host memory for a request, and end the request."""
    uses = BlockUses()
    store.read(keys, 0, uses)
    store.complete_read(keys)
    store.over(uses)


def test_last_block_of_request_is_evicted_first() -> None:
    store = HostBlockStore(3, "lru", RULES)
    stored(store, 1, 2, 3)
    stored(store, 4)
    assert sorted(store.refs) == [1, 2, 4]


def test_least_recently_used_block_is_evicted_first() -> None:
    store = HostBlockStore(3, "lru", RULES)
    for key in (1, 2, 3):
        stored(store, key)
    read(store, 1)
    stored(store, 4, 5)
    assert sorted(store.refs) == [1, 4, 5]


def test_arc_keeps_block_used_twice() -> None:
    lru, arc = HostBlockStore(3, "lru", RULES), HostBlockStore(3, "arc", RULES)
    for store in (lru, arc):
        stored(store, 1)
        read(store, 1)
        for key in (2, 3, 4, 5, 6):
            stored(store, key)
    assert 1 not in lru.refs
    assert 1 in arc.refs


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_blocks_being_copied_are_not_evicted(policy: str) -> None:
    store, uses = HostBlockStore(2, policy, RULES), BlockUses()
    stored(store, 1)
    store.read([1], 0, uses)
    # written to the free block; the write is in flight
    assert store.write([2], 0, BlockUses()) == [2]
    late = BlockUses()
    assert store.write([3], 0, late) is None
    store.complete_read([1])
    assert store.write([3], 0, late) == [3]
    assert sorted(store.refs) == [2, 3]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_blocks_of_same_prompt_are_not_evicted(policy: str) -> None:
    store = HostBlockStore(2, policy, RULES)
    stored(store, 1, 2)
    assert store.write([1, 2, 3], 0, BlockUses()) is None
    assert sorted(store.refs) == [1, 2]


def test_present_blocks_are_not_written_again() -> None:
    store = HostBlockStore(4, "lru", RULES)
    stored(store, 1, 2)
    assert store.write([1, 2, 3], 0, BlockUses()) == [3]
