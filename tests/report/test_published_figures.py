"""Tests of the comparison of published and simulated values."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.metrics.scenario_runner import run_file
from simkv.report.published_figures import PublishedComparison, compare_published

TEXT = """\
name: t
workload:
  requests:
    - {prompt_tokens: 4, output_tokens: 3}
    - {prompt_tokens: 4, output_tokens: 9, timeout: 5.5}
engine: {name: mistralrs, variant: pr2034}
profile: unit-step
variants: {a: {}, b: {}}
published:
  a:
    figures: {makespan_s: 5.0, timed_out: 0}
    at_least: {finished: 1, preemptions: 3}
    e2e_s: {0: 2.0, 1: 4.0, 99: 1.0}
    finish_s: {0: 3.0}
"""


@pytest.fixture
def rows(tmp_path: Path) -> list[PublishedComparison]:
    (tmp_path / "s.yaml").write_text(TEXT)
    return compare_published(run_file(tmp_path / "s.yaml"))


def test_every_published_figure_has_a_row(rows: list[PublishedComparison]) -> None:
    assert [(row.variant, row.figure, row.published, row.simulated) for row in rows] == [
        ("a", "makespan_s", 5.0, 5.5),
        ("a", "timed_out", 0, 1),
        ("a", "finished", 1, 1),
        ("a", "preemptions", 3, 0),
        ("a", "request 0 e2e_s", 2.0, 3.0),
        ("a", "request 1 e2e_s", 4.0, None),  # the request timed out
        ("a", "request 99 e2e_s", 1.0, None),  # there is no such request
        ("a", "request 0 finish_s", 3.0, 3.0),
    ]


def test_errors_are_relative_to_the_published_figure(rows: list[PublishedComparison]) -> None:
    errors = {row.figure: row.error for row in rows}
    assert errors["makespan_s"] == pytest.approx(0.1)
    assert errors["request 0 e2e_s"] == pytest.approx(0.5)
    assert errors["request 0 finish_s"] == 0.0
    assert errors["timed_out"] is None  # no relative difference to 0 exists
    assert errors["request 1 e2e_s"] is None


def test_bounds_have_no_error(rows: list[PublishedComparison]) -> None:
    bounds = {row.figure: row.holds for row in rows if row.bound}
    assert bounds == {"finished": True, "preemptions": False}
    assert {row.error for row in rows if row.bound} == {None}
    assert {row.holds for row in rows if not row.bound} == {None}


def test_unknown_simulated_figure_meets_no_bound() -> None:
    assert PublishedComparison("a", "x", 1.0, None, bound=True).holds is False
