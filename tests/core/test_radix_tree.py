"""Tests of the radix tree: whole pages, splits, recency, locks, eviction."""

from hypothesis import given
from hypothesis import strategies as st

from simkv.core.block_keys import TokenContent
from simkv.core.radix_tree import RadixTree
from simkv.core.request import Prompt, Segment


def tokens(*parts: tuple[str, int]) -> TokenContent:
    """Return content with the first n tokens of each named stream."""
    segments = tuple(Segment(stream, 0, n) for stream, n in parts)
    return TokenContent(Prompt(0, sum(n for _, n in parts), 1, segments=segments))


def spans(tree: RadixTree) -> list[tuple[int, int]]:
    return sorted((node.start, node.end) for node in tree.nodes())


def cached(tree: RadixTree, stream: str, n: int) -> int:
    return tree.match(tokens((stream, n)), n)[0]


def test_partial_match_splits_node_at_page_boundary() -> None:
    tree = RadixTree(page_size=4)
    assert tree.insert(tokens(("g", 10), ("a", 6)), 15)[0] == 0  # 12 of the 15 are whole pages
    length, node = tree.match(tokens(("g", 10), ("b", 6)), 16)  # equal up to 10, which is mid-page
    assert (length, node.end) == (8, 8)
    assert spans(tree) == [(0, 8), (8, 12)]
    assert tree.evictable == 12


def test_match_ends_where_the_shorter_common_segment_ends() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(tokens(("g", 10)), 10)
    assert tree.match(tokens(("g", 4), ("b", 6)), 10)[0] == 4
    assert tree.match(tokens(("g", 10), ("b", 6)), 16)[0] == 10
    assert tree.insert(tokens(("g", 7), ("b", 6)), 13)[0] == 7


def test_insert_returns_known_prefix_and_adds_rest() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(tokens(("g", 10), ("a", 5)), 15)
    present, node = tree.insert(tokens(("g", 10), ("b", 3)), 13)
    assert (present, node.start, node.end) == (10, 10, 13)
    assert spans(tree) == [(0, 10), (10, 13), (10, 15)]
    assert tree.evictable == 18
    assert tree.insert(tokens(("g", 10)), 4) == (4, tree.match(tokens(("g", 4)), 4)[1])


def test_match_ignores_partial_pages() -> None:
    tree = RadixTree(page_size=4)
    tree.insert(tokens(("g", 8)), 8)
    before = tree.fingerprint()
    assert tree.match(tokens(("g", 8)), 3) == (0, tree.root)
    assert tree.fingerprint() == before


def test_eviction_removes_whole_leaves_in_lru_order() -> None:
    tree = RadixTree(page_size=1)
    for stream in "abc":
        tree.insert(tokens((stream, 10)), 10)
    cached(tree, "a", 10)
    assert tree.evict(1) == 10
    assert [cached(tree, stream, 10) for stream in "abc"] == [10, 0, 10]
    assert tree.evict(11) == 20
    assert tree.evict(1) == 0
    assert tree.evictable == 0


def test_parent_is_evictable_after_last_child() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(tokens(("g", 10), ("a", 5)), 15)
    cached(tree, "g", 10)
    assert tree.evict(1) == 5
    assert cached(tree, "g", 10) == 10
    assert tree.evict(1) == 10


def test_split_refreshes_access_time_of_lower_part() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(tokens(("a", 10)), 10)
    tree.insert(tokens(("b", 10)), 10)
    cached(tree, "a", 4)
    tree.evict(1)
    assert cached(tree, "b", 10) == 0
    assert cached(tree, "a", 10) == 10


def test_split_by_insert_refreshes_access_time_of_upper_part() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(tokens(("a", 10)), 10)
    _, b = tree.insert(tokens(("b", 10)), 10)
    tree.insert(tokens(("a", 4), ("c", 5)), 9)  # splits a; b is newer than a
    tree.lock(b)
    assert tree.evict(11) == 11  # both leaves below the common part of a
    tree.unlock(b)
    assert tree.evict(1) == 10
    assert cached(tree, "a", 4) == 4


def test_lock_protects_path_to_root_only() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(tokens(("g", 10), ("a", 5)), 15)
    _, node = tree.match(tokens(("g", 10)), 10)
    tree.lock(node)
    tree.lock(node)
    assert tree.evictable == 5
    tree.unlock(node)
    assert tree.evict(100) == 5
    tree.unlock(node)
    assert tree.evictable == 10
    assert tree.evict(100) == 10


def test_split_keeps_locks_on_both_parts() -> None:
    tree = RadixTree(page_size=1)
    _, node = tree.insert(tokens(("a", 10)), 10)
    tree.lock(node)
    cached(tree, "a", 4)
    assert spans(tree) == [(0, 4), (4, 10)]
    assert tree.evict(100) == 0
    tree.unlock(node)
    assert tree.evict(100) == 10


def test_fingerprint_depends_on_order_not_time() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(tokens(("a", 4)), 4)
    tree.insert(tokens(("b", 4)), 4)
    before = tree.fingerprint()
    cached(tree, "b", 4)
    assert tree.fingerprint() == before
    cached(tree, "a", 4)
    assert tree.fingerprint() != before


PARTS = st.lists(st.tuples(st.sampled_from("gab"), st.integers(1, 9)), min_size=1, max_size=4)


@given(
    st.lists(PARTS, min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from("mie"), st.integers(0, 9), st.integers(1, 36)), max_size=40),
    st.sampled_from([1, 4]),
)
def test_known_matches_change_nothing(
    prompts: list[list[tuple[str, int]]], calls: list[tuple[str, int, int]], page: int
) -> None:
    """A tree whose contents walk it again is equal to a tree whose contents are always new."""
    known, fresh = RadixTree(page), RadixTree(page)
    contents = [tokens(*parts) for parts in prompts]
    for kind, which, count in calls:
        number = which % len(prompts)
        count = min(count, sum(n for _, n in prompts[number]))
        if kind == "e":
            assert known.evict(count) == fresh.evict(count)
        else:
            again = tokens(*prompts[number])
            name = "match" if kind == "m" else "insert"
            found = [
                getattr(tree, name)(content, count)
                for tree, content in ((known, contents[number]), (fresh, again))
            ]
            assert found[0][0] == found[1][0]
        assert known.fingerprint() == fresh.fingerprint()
        assert known.evictable == fresh.evictable
