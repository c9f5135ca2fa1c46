"""Tests of block keys: two prompts share exactly the tokens that their segments specify."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from simkv.core.block_keys import KEYS_PER_RUN, BlockKeys, TokenContent
from simkv.core.request import Prompt, Segment
from tests.core.shared_prefixes import common_prefix


def content(i: int, *segments: tuple[str, int, int]) -> TokenContent:
    parts = tuple(Segment(*segment) for segment in segments)
    return TokenContent(Prompt(i, sum(s.end - s.start for s in parts), 9, segments=parts))


def test_prompts_without_segments_share_no_keys() -> None:
    a, b = TokenContent(Prompt(0, 4, 1)), TokenContent(Prompt(1, 4, 1))
    assert a.slices(0, 4) == (Segment("u0", 0, 4),)
    assert common_prefix(a, b, 4) == 0


def test_output_is_separate_stream_after_prompt() -> None:
    a = TokenContent(Prompt(3, 4, 1))
    assert a.slices(2, 7) == (Segment("u3", 2, 4), Segment("o3", 0, 3))
    assert a.slices(4, 4) == ()


def test_slices_are_independent_of_segmentation() -> None:
    whole = content(0, ("g", 0, 6))
    cut = content(1, ("g", 0, 2), ("g", 2, 2), ("g", 2, 6))
    assert whole.slices(1, 6) == cut.slices(1, 6) == (Segment("g", 1, 6),)


def test_repeated_stream_is_not_merged() -> None:
    repeated = content(0, ("g", 0, 3), ("g", 0, 3))
    assert repeated.slices(0, 6) == (Segment("g", 0, 3), Segment("g", 0, 3))


def test_common_prefix_is_independent_of_segmentation() -> None:
    a = content(0, ("g", 0, 5), ("u0", 0, 9))
    b = content(1, ("g", 0, 2), ("g", 2, 8))
    assert common_prefix(a, b, 100) == 5
    assert common_prefix(a, b, 3) == 3
    assert common_prefix(b, a, 100) == 5


def test_keys_are_chained() -> None:
    keys = BlockKeys(2)
    a, b = content(0, ("g", 0, 4)), content(1, ("h", 0, 2), ("g", 2, 4))
    of_a: list[int] = []
    of_b: list[int] = []
    keys.extend(of_a, a, 4)
    keys.extend(of_b, b, 4)
    assert a.slices(2, 4) == b.slices(2, 4)  # the same tokens in the second block,
    assert of_a[1] != of_b[1]  # after different tokens in the first


def test_only_full_blocks_have_keys() -> None:
    keys, a, named = BlockKeys(4), content(0, ("g", 0, 11)), []
    keys.extend(named, a, 3)
    assert named == []
    keys.extend(named, a, 7)
    first = list(named)
    keys.extend(named, a, 11)
    assert len(first) == 1
    assert named[:1] == first
    assert len(named) == 2
    keys.extend(named, a, 4)  # fewer tokens: the keys do not change
    assert len(named) == 2


def test_keys_cover_outputs() -> None:
    keys = BlockKeys(2)
    a, b = content(0, ("g", 0, 3)), content(1, ("g", 0, 3))
    of_a: list[int] = []
    of_b: list[int] = []
    keys.extend(of_a, a, 4)
    keys.extend(of_b, b, 4)
    assert of_a[0] == of_b[0]
    assert of_a[1] != of_b[1]  # each request has its own output tokens


def test_keys_do_not_depend_on_the_number_of_calls() -> None:
    """The keys of a prompt are the same whether it is computed in chunks or at once."""
    keys, blocks = BlockKeys(2), 3 * KEYS_PER_RUN
    a, b, other = (content(i, (name, 0, 2 * blocks)) for i, name in enumerate("ggh"))
    at_once: list[int] = []
    in_chunks: list[int] = []
    others: list[int] = []
    keys.extend(in_chunks, a, 6)
    keys.extend(others, other, 2 * blocks)
    for tokens in (8, 20, 22, 2 * blocks):
        keys.extend(in_chunks, a, tokens)
    keys.extend(at_once, b, 2 * blocks)
    assert in_chunks == at_once
    assert len(set(at_once)) == len(set(others)) == blocks
    assert not set(at_once) & set(others)


def test_different_blocks_after_a_common_prefix_have_different_keys() -> None:
    keys = BlockKeys(2)
    named: dict[str, list[int]] = {"g": [], "h": []}
    keys.extend(named["g"], content(0, ("g", 0, 8)), 8)
    keys.extend(named["h"], content(1, ("g", 0, 4), ("h", 4, 8)), 8)
    assert named["g"][:2] == named["h"][:2]
    assert not set(named["g"][2:]) & set(named["h"][2:])


SEGMENTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 4)).map(
        lambda x: (x[0], x[1], x[1] + x[2])
    ),
    min_size=1,
    max_size=4,
)


@given(SEGMENTS, SEGMENTS, st.integers(1, 3))
def test_equal_keys_mean_equal_tokens(
    left: list[tuple[str, int, int]], right: list[tuple[str, int, int]], block_size: int
) -> None:
    def tokens(segments: list[tuple[str, int, int]]) -> list[tuple[str, int]]:
        return [(stream, i) for stream, start, end in segments for i in range(start, end)]

    a, b = tokens(left), tokens(right)
    keys = BlockKeys(block_size)
    of_a: list[int] = []
    of_b: list[int] = []
    keys.extend(of_a, content(0, *left), len(a))
    keys.extend(of_b, content(1, *right), len(b))
    for i, (x, y) in enumerate(zip(of_a, of_b, strict=False)):
        end = (i + 1) * block_size
        assert (x == y) == (a[:end] == b[:end])
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    shared = min(len(a), len(b)) if same is None else same
    limit = min(len(a), len(b))
    assert common_prefix(content(0, *left), content(1, *right), limit) == shared


def test_run_left_counts_blocks_before_a_new_run() -> None:
    keys, made = BlockKeys(2), content(0, ("g", 0, 3), ("u0", 0, 200))
    of: array[int] = array("q")
    assert keys.run_left(of, made) == 0
    for blocks in range(1, 100):
        left = keys.run_left(of, made)
        before = len(keys._runs)
        keys.extend(of, made, 2 * blocks)
        assert (len(keys._runs) > before) == (left == 0)
    assert keys.run_left(of, made) == min(KEYS_PER_RUN - (of[-1] + 1) % KEYS_PER_RUN, 101 - len(of))


def test_run_does_not_continue_in_another_stream() -> None:
    keys, made = BlockKeys(2), content(0, ("g", 0, 4), ("u0", 0, 8))
    of: array[int] = array("q")
    keys.extend(of, made, 2)
    assert keys.run_left(of, made) == 1
    keys.extend(of, made, 4)
    assert keys.run_left(of, made) == 0


@given(st.data(), st.integers(1, 4), st.integers(0, 2))
def test_equal_keys_mean_equal_tokens_in_sessions(
    data: st.DataObject, block_size: int, ahead: int
) -> None:
    """Keys that later turns copy from earlier ones identify the same tokens as computed keys."""
    keys = BlockKeys(block_size, ahead)
    turns: list[tuple[TokenContent, list[int]]] = []
    prompts: list[tuple[tuple[str, int, int], ...]] = []
    for turn in range(data.draw(st.integers(2, 6), "turns")):
        begin: tuple[tuple[str, int, int], ...] = (("g", 0, data.draw(st.integers(1, 9))),)
        if turn and data.draw(st.booleans(), "continues"):
            before = data.draw(st.integers(0, turn - 1), "before")
            answer = data.draw(st.integers(1, 7), "answer")
            begin = (*prompts[before], (f"o{before}", 0, answer))
        prompts.append((*begin, (f"u{turn}", 0, data.draw(st.integers(1, 7), "new"))))
        made = content(turn, *prompts[-1])
        tokens = sum(end - start for _, start, end in prompts[-1]) + 5
        named: list[int] = []
        keys.extend(named, made, data.draw(st.integers(0, tokens), "first"))
        keys.extend(named, made, tokens)
        assert len(named) == tokens // block_size
        turns.append((made, named))
    for a, of_a in turns:
        for b, of_b in turns:
            for i, (x, y) in enumerate(zip(of_a, of_b, strict=False)):
                end = (i + 1) * block_size + ahead
                assert (x == y) == (a.slices(0, end) == b.slices(0, end))
