"""The search against trying everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.study.plan.candidate_search import (
    NEIGHBOURS,
    PROBES_AT_ONCE,
    find_edge,
    find_nonmonotone_candidates,
    next_probes,
)


def searched(meets: list[bool], hint: int | None = None) -> dict[int, bool]:
    """All that a search tries, and what it finds there."""
    known: dict[int, bool] = {}
    while probes := next_probes(known, len(meets), hint=hint):
        assert not set(probes) & set(known)
        assert all(0 <= probe < len(meets) for probe in probes)
        known |= {probe: meets[probe] for probe in probes}
    return known


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_monotone_answers_are_those_of_trying_everything(count: int) -> None:
    for first in range(count + 1):
        meets = [i >= first for i in range(count)]
        for hint in (None, *range(count)):
            known = searched(meets, hint)
            assert find_edge(known) == (first if first < count else None)
            assert find_nonmonotone_candidates(known) == []


def test_it_tries_few() -> None:
    for first in range(1, 1000):
        known = searched([i >= first for i in range(1000)])
        assert len(known) <= 2 + 7 * PROBES_AT_ONCE + 2 * NEIGHBOURS


def test_from_the_cheap_end_little_is_tried_that_is_far_too_large() -> None:
    for first in range(1000):
        known = searched([i >= first for i in range(1000)], hint=0)
        assert max(known) <= max(4 * (first + 1), first + NEIGHBOURS)
        assert len(known) <= 11 + 6 * PROBES_AT_ONCE + 2 * NEIGHBOURS
    assert sorted(searched([True] * 20, hint=0)) == [0, 1, 2]
    assert sorted(searched([False] + [True] * 19, hint=0)) == [0, 1, 2, 3]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 39) | st.none())
def test_whatever_it_meets_the_answer_stands(meets: list[bool], hint: int | None) -> None:
    known = searched(meets, None if hint is None else min(hint, len(meets) - 1))
    assert all(meets[i] == verdict for i, verdict in known.items())
    found = find_edge(known)
    if found is None:
        return
    assert all(meets[found : found + NEIGHBOURS + 1])
    assert found == 0 or not meets[found - 1]
    around = range(max(found - NEIGHBOURS, 0), min(found + NEIGHBOURS + 1, len(meets)))
    assert set(around) <= set(known)


@pytest.mark.parametrize("hole", [1, 2])
def test_a_planted_hole_above_is_caught(hole: int) -> None:
    meets = [i >= 8 and i != 8 + hole for i in range(20)]
    known = searched(meets)
    assert find_edge(known) == 8 + hole + 1
    assert 8 + hole in find_nonmonotone_candidates(known)


@pytest.mark.parametrize("island", [6, 7])
def test_a_planted_island_below_is_caught_and_is_not_the_answer(island: int) -> None:
    meets = [i >= 9 or i == island for i in range(20)]
    known = searched(meets)
    assert find_edge(known) == 9
    assert find_nonmonotone_candidates(known) != []
    assert known[island]


def test_a_surprise_widens_the_search() -> None:
    meets = [i in (5, 7) or i >= 9 for i in range(30)]
    known = searched(meets)
    assert find_edge(known) == 9
    assert set(range(9 - 2 * NEIGHBOURS, 9 + 2 * NEIGHBOURS + 1)) <= set(known)


def test_met_only_in_the_middle() -> None:
    known = searched([30 <= i < 42 for i in range(80)])
    assert find_edge(known) == 30
    assert 79 in find_nonmonotone_candidates(known)


def test_an_interrupted_search_goes_on_as_if_it_had_not_been() -> None:
    draw = random.Random(1)
    meets = [i >= 37 for i in range(100)]
    whole = searched(meets)
    known: dict[int, bool] = {}
    while probes := next_probes(known, len(meets)):
        done = draw.sample(probes, draw.randint(1, len(probes)))
        known |= {probe: meets[probe] for probe in done}
    assert find_edge(known) == find_edge(whole) == 37
