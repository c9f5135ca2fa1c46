"""Tests that compare the search with an exhaustive search."""

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
    """Run a search; return whether each tried candidate meets the objectives, and the answer."""
    known: dict[int, bool] = {}
    while probes := next_probes(known, len(meets), hint=hint):
        assert not set(probes) & set(known)
        assert all(0 <= probe < len(meets) for probe in probes)
        known |= {probe: meets[probe] for probe in probes}
    return known


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_monotone_search_matches_exhaustive_search(count: int) -> None:
    for first in range(count + 1):
        meets = [i >= first for i in range(count)]
        for hint in (None, *range(count)):
            known = searched(meets, hint)
            assert find_edge(known) == (first if first < count else None)
            assert find_nonmonotone_candidates(known) == []


def test_search_tries_few_candidates() -> None:
    for first in range(1, 1000):
        known = searched([i >= first for i in range(1000)])
        assert len(known) <= 2 + 7 * PROBES_AT_ONCE + 2 * NEIGHBOURS


def test_hint_avoids_oversized_candidates() -> None:
    for first in range(1000):
        known = searched([i >= first for i in range(1000)], hint=0)
        assert max(known) <= max(4 * (first + 1), first + NEIGHBOURS)
        assert len(known) <= 11 + 6 * PROBES_AT_ONCE + 2 * NEIGHBOURS
    assert sorted(searched([True] * 20, hint=0)) == [0, 1, 2]
    assert sorted(searched([False] + [True] * 19, hint=0)) == [0, 1, 2, 3]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 39) | st.none())
def test_answer_is_confirmed_by_neighbours(meets: list[bool], hint: int | None) -> None:
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
def test_detects_failing_candidate_above_answer(hole: int) -> None:
    meets = [i >= 8 and i != 8 + hole for i in range(20)]
    known = searched(meets)
    assert find_edge(known) == 8 + hole + 1
    assert 8 + hole in find_nonmonotone_candidates(known)


@pytest.mark.parametrize("island", [6, 7])
def test_detects_isolated_answer_below(island: int) -> None:
    meets = [i >= 9 or i == island for i in range(20)]
    known = searched(meets)
    assert find_edge(known) == 9
    assert find_nonmonotone_candidates(known) != []
    assert known[island]


def test_nonmonotone_result_widens_search() -> None:
    meets = [i in (5, 7) or i >= 9 for i in range(30)]
    known = searched(meets)
    assert find_edge(known) == 9
    assert set(range(9 - 2 * NEIGHBOURS, 9 + 2 * NEIGHBOURS + 1)) <= set(known)


def test_finds_answer_met_only_in_the_middle() -> None:
    known = searched([30 <= i < 42 for i in range(80)])
    assert find_edge(known) == 30
    assert 79 in find_nonmonotone_candidates(known)


def test_interrupted_search_resumes_identically() -> None:
    draw = random.Random(1)
    meets = [i >= 37 for i in range(100)]
    whole = searched(meets)
    known: dict[int, bool] = {}
    while probes := next_probes(known, len(meets)):
        done = draw.sample(probes, draw.randint(1, len(probes)))
        known |= {probe: meets[probe] for probe in done}
    assert find_edge(known) == find_edge(whole) == 37
