"""Tests of ``simkv zoo --source``: judgements, the exit code and the files, without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from rich.console import Console
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.scenario.custom.code_source import set_trust
from simkv.scenario.packaged_scenarios import PackagedIncident, find_incidents
from simkv.scenario.scenario import Scenario
from simkv.study.change_check import FIGURES
from simkv.study.field_changes import with_field
from simkv.validation import source_comparison
from simkv.validation.source_comparison import (
    FigureDifference,
    LoadVariant,
    SourceComparison,
    compare_incidents,
    render_comparisons,
)

NAME = "vllm-37307-partial-admission"


@pytest.fixture(autouse=True)
def untrusted() -> None:
    set_trust(False)


def port(incident: PackagedIncident, variant: str) -> Scenario:
    """Return a scenario that replaces a source and has the decisions of simkv's own scheduler."""
    return incident.variants[variant]


def swapped(incident: PackagedIncident, variant: str) -> Scenario:
    """Return a scenario that replaces a source in which a default is reversed."""
    return incident.variants["before" if variant == "after" else "after"]


def starving(incident: PackagedIncident, variant: str) -> Scenario:
    """Return a scenario that replaces a source whose second request starves."""
    late = {"requests": [{"prompt_tokens": 8000, "output_tokens": 200}] * 2}
    slow = with_field(incident.variants[variant], "timeout", 4.0, incident.path.parent)
    return with_field(slow, "workload", late, incident.path.parent)


def compare(load: LoadVariant) -> dict[str, SourceComparison]:
    rows = compare_incidents(find_incidents([NAME]), load, 0.01)
    return {row.variant: row for row in rows}


def test_equal_results_are_unchanged() -> None:
    rows = compare(port)
    assert list(rows) == ["before", "after"]
    assert {row.judgement for row in rows.values()} == {"unchanged"}
    assert not any(row.is_regression or row.differences for row in rows.values())


def test_figures_decide_between_equal_verdicts() -> None:
    rows = compare(swapped)
    assert (rows["before"].judgement, rows["before"].is_regression) == ("better", False)
    assert (rows["after"].judgement, rows["after"].is_regression) == ("worse", False)
    changed = {one.name: (one.before, one.after) for one in rows["after"].differences}
    assert changed["preemptions"] == (0, 61)
    better = FigureDifference("output_throughput", 1.0, 2.0)
    worse = FigureDifference("preemptions", 1.0, 2.0)
    mixed = replace(rows["before"], differences=(better, worse))
    assert mixed.judgement == "mixed"
    larger = [FigureDifference(name, 1.0, 9.0) for name in FIGURES[:3]]
    assert all(one.is_worse for one in larger)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(*render_comparisons([replace(mixed, differences=(better, *larger))]))
    assert "(better)" in shown.get()


def test_starved_incident_is_regression() -> None:
    row = compare(starving)["after"]
    assert row.after is not None
    assert row.after.verdict == "starved"
    assert (row.judgement, row.is_regression, row.as_check().ok) == ("worse", True, False)


def test_refused_setting_has_reason() -> None:
    def load(incident: PackagedIncident, variant: str) -> Scenario:
        raise InputError("engine.watermark: not supported")

    rows = compare_incidents(find_incidents([NAME]), load, 0.01)
    assert {row.judgement for row in rows} == {"not run"}
    assert rows[0].refused == "engine.watermark: not supported"
    assert rows[0].as_check().ok


def test_variants_of_other_releases_run_once() -> None:
    incidents = find_incidents(["vllm-31731-heavy-head"])
    found = [row.variant for row in compare_incidents(incidents, port, 0.01)]
    assert found == ["before", "before-stream"]


def test_baseline_is_the_port_of_a_release() -> None:
    incidents = find_incidents(["vllm-37307-partial-admission"])
    newest, older = (
        compare_incidents(incidents, port, 0.0, release=release) for release in (None, "0.17.0")
    )
    assert newest[1].judgement == "unchanged"
    assert older[1].variant == "after"
    assert "not available in vLLM 0.17.0" in older[1].refused


def zoo(*words: object) -> Any:
    return CliRunner().invoke(app, ["zoo", NAME, *map(str, words), "--jobs", "1"])


def test_command_fails_for_regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "vllm"
    source.mkdir()
    (source / "__init__.py").write_text("")

    monkeypatch.setattr(source_comparison, "load_from", lambda _: port)
    junit = tmp_path / "out.xml"
    same = zoo("--source", tmp_path, "--trust", "--junit", junit)
    assert same.exit_code == 0, same.output
    assert "2 unchanged" in same.stdout
    assert sum(suite.failures for suite in JUnitXml.fromfile(str(junit))) == 0
    monkeypatch.setattr(source_comparison, "load_from", lambda _: starving)
    worse = zoo("--source", tmp_path, "--trust", "--junit", junit)
    assert worse.exit_code == 1
    assert f"REGRESSION: {NAME}, after: served by the newest release, starved" in worse.stdout
    assert sum(suite.failures for suite in JUnitXml.fromfile(str(junit))) == 2
    answer = json.loads(zoo("--source", tmp_path, "--trust", "--json").stdout)
    assert not answer["ok"]
    assert [one["judgement"] for one in answer["comparisons"]] == ["worse", "worse"]


def test_command_rejects_bad_source(tmp_path: Path) -> None:
    for words, message in (
        (("--source", tmp_path), "review the code, then pass --trust"),
        (("--source", tmp_path, "--trust"), "contains no vllm/"),
        (("--source", tmp_path / "none", "--trust"), "does not exist"),
    ):
        result = zoo(*words)
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    other = CliRunner().invoke(
        app, ["zoo", "mistralrs-forty", "--source", str(tmp_path), "--trust"]
    )
    assert "an incident of mistralrs" in str(other.exception)
