from __future__ import annotations

import random

from simkv.study.history.change_search import HistorySearch, SkippedRevision, find_changes


def search(states: str, samples: int = 2) -> tuple[HistorySearch[str], list[int]]:
    """Search a history given as a string with a letter per revision; a revision ``-`` cannot be
    run.
    """
    asked: list[int] = []

    def run(index: int) -> str | SkippedRevision:
        asked.append(index)
        return SkippedRevision("broken") if states[index] == "-" else states[index]

    return find_changes(len(states), run, str, samples), asked


def test_change_between_neighbours() -> None:
    found, asked = search("g" * 700 + "b" * 300)
    assert [(change.before, change.after) for change in found.changes] == [(699, 700)]
    assert len(asked) <= 12
    assert len(asked) == len(set(asked))


def test_change_hidden_by_skipped_revisions() -> None:
    found, _ = search("ggg--bbbb")
    assert [list(change.candidates) for change in found.changes] == [[3, 4, 5]]
    assert sorted(found.skipped) == [3, 4]


def test_long_unusable_stretch_costs_few_runs() -> None:
    _, asked = search("g" * 300 + "-" * 400 + "g" * 100 + "b" * 200)
    assert len(asked) < 60


def test_equal_ends_have_no_change() -> None:
    found, asked = search("gggbggg")
    assert not found.changes
    assert asked == [0, 6]


def test_samples_find_change_that_is_undone() -> None:
    found, _ = search("ggggbbbggg", samples=4)
    assert [(change.before, change.after) for change in found.changes] == [(3, 4), (6, 7)]


def test_random_histories() -> None:
    chance = random.Random(1)
    for _ in range(300):
        states = "".join(chance.choices("gb-", k=chance.randint(2, 40)))
        states = f"g{states}b"
        found, asked = search(states, chance.randint(2, 6))
        assert len(asked) == len(set(asked))
        assert found.changes
        for change in found.changes:
            assert states[change.before] != states[change.after]
            assert set(states[change.before + 1 : change.after]) <= {"-"}
