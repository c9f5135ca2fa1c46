"""Tests of mutants of a module, and of the report of ``python -m dev.mutants``."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from dev.mutants import (
    EQUIVALENT,
    KILLED,
    SURVIVED,
    TABLE,
    TIMEOUT,
    read_results,
    report,
    run_tests,
    shuffle_mutants,
)
from dev.mutation_operators import Mutant, find_mutants

SOURCE = b'''"""\xc3\x9c: a comment in the file moves no position."""

def first(values: list[int], limit: int = 3) -> int:
    for one in values:  # \xc3\xa4
        if not one:
            continue
        if one < limit and one + 1 > limit:
            return min(one, limit)
    raise ValueError(f"{limit + 1}")
'''


def test_mutants_change_one_expression_each() -> None:
    found = find_mutants("m.py", SOURCE)
    assert [one.key for one in found] == [
        "m.py first: 3 -> 4",
        "m.py first: not one -> one",
        "m.py first: continue -> break",
        "m.py first: one < limit and one + 1 > limit -> one < limit or one + 1 > limit",
        "m.py first: one < limit -> one <= limit",
        "m.py first: one + 1 > limit -> one + 1 >= limit",
        "m.py first: one + 1 -> one - 1",
        "m.py first: 1 -> 2",
        "m.py first: min(one, limit) -> max(one, limit)",
    ]
    for mutant in found:
        before, after = ast.parse(SOURCE), ast.parse(mutant.apply(SOURCE))
        assert ast.dump(before) != ast.dump(after)
        assert mutant.key.rpartition(" -> ")[2] in ast.unparse(after)


def test_repeated_changes_have_different_names() -> None:
    keys = [one.key for one in find_mutants("m.py", b"def f():\n    return 1, 1\n")]
    assert keys == ["m.py f: 1 -> 2", "m.py f: 1 -> 2 #2"]


@pytest.mark.parametrize("group", TABLE["groups"])
def test_order_depends_only_on_the_seed(group: str) -> None:
    first, other = shuffle_mutants(group, 0), shuffle_mutants(group, 1)
    assert len({one.key for one in first}) == len(first) > 300
    assert shuffle_mutants(group, 0) == first != other
    assert {one.key for one in other} == {one.key for one in first}


def test_status_is_the_result_of_the_tests(tmp_path: Path) -> None:
    (tmp_path / "test_fine.py").write_text("def test_fine():\n    pass\n")
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert 0\n")
    (tmp_path / "test_slow.py").write_text("def test_slow():\n    while True:\n        pass\n")
    fine, wrong, slow = ["test_fine.py"], ["test_wrong.py"], ["test_slow.py"]
    assert run_tests(tmp_path, [fine, fine], 60) == (SURVIVED, "")
    assert run_tests(tmp_path, [fine, wrong], 60) == (KILLED, "test_wrong.py::test_wrong")
    assert run_tests(tmp_path, [slow], 3) == (TIMEOUT, "")
    with pytest.raises(RuntimeError):
        run_tests(tmp_path, [["test_missing.py"]], 60)


def test_last_result_counts_and_survivors_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = {"pool": [Mutant(key, 1, 0, 0, "") for key in ("a", "b")]}
    path = tmp_path / "results.jsonl"
    lines = [("a", KILLED), ("b", SURVIVED), ("b", KILLED)]
    rows = [json.dumps({"mutant": key, "status": status}) for key, status in lines]
    path.write_text("\n".join(rows[:2]))
    assert report(sample, read_results(path)) == 1
    assert capsys.readouterr().out == "pool: 2 mutants, 1 killed, 1 survived\nb (line 1)\n"
    path.write_text("\n".join(rows))
    assert report(sample, read_results(path)) == 0
    monkeypatch.setitem(TABLE, EQUIVALENT, {"b": "same order"})
    path.write_text(rows[0])
    assert report(sample, read_results(path)) == 0
    assert capsys.readouterr().out.endswith("pool: 2 mutants, 1 killed, 1 equivalent\n")
