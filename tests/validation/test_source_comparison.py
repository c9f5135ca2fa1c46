"""Tests of ``simkv zoo --source``: judgements, the exit code and the files, without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.scenario.custom.code_source import set_trust
from simkv.scenario.packaged_scenarios import PackagedIncident, find_incidents
from simkv.study.whatif.trial_evaluation import RunFigures, evaluate_job, make_trial_job
from simkv.validation import source_comparison
from simkv.validation.source_comparison import SourceComparison, compare_incidents

NAME = "vllm-37307-partial-admission"


@pytest.fixture(autouse=True)
def untrusted() -> None:
    set_trust(False)


def port(incident: PackagedIncident, variant: str) -> RunFigures:
    """Return the result of a source with the decisions of the port."""
    scenario = incident.variants[variant]
    return evaluate_job(make_trial_job(scenario, incident.path.parent))


def compare(changes: dict[str, Any], **values: float) -> dict[str, SourceComparison]:
    """Return the comparisons of one incident whose source has other results."""

    def run(incident: PackagedIncident, variant: str) -> RunFigures:
        found = port(incident, variant)
        return replace(found, values={**found.values, **values}, **changes)

    return {row.variant: row for row in compare_incidents(find_incidents([NAME]), run, 0.01)}


def test_equal_results_are_unchanged() -> None:
    rows = compare({})
    assert list(rows) == ["before", "after"]
    assert {row.judgement for row in rows.values()} == {"unchanged"}
    assert not any(row.is_regression or row.differences for row in rows.values())


def test_figures_decide_between_equal_verdicts() -> None:
    row = compare({}, preemptions=10)["before"]
    assert (row.judgement, row.is_regression) == ("better", False)
    assert [(one.name, one.after) for one in row.differences] == [("preemptions", 10)]
    assert compare({}, preemptions=10)["after"].judgement == "worse"
    assert compare({}, preemptions=10, output_throughput=1)["before"].judgement == "mixed"
    assert compare({}, output_throughput=1000)["before"].judgement == "better"


def test_starved_incident_is_regression() -> None:
    row = compare({"verdict": "starved", "detail": "request 1"})["after"]
    assert (row.judgement, row.is_regression, row.as_check().ok) == ("worse", True, False)


def test_refused_setting_has_reason() -> None:
    def run(incident: PackagedIncident, variant: str) -> RunFigures:
        raise InputError("engine.watermark: not supported")

    rows = list(compare_incidents(find_incidents([NAME]), run, 0.01))
    assert {row.judgement for row in rows} == {"not run"}
    assert rows[0].refused == "engine.watermark: not supported"
    assert rows[0].as_check().ok


def test_variants_of_other_releases_run_once() -> None:
    incidents = find_incidents(["vllm-31731-heavy-head"])
    found = [row.variant for row in compare_incidents(incidents, port, 0.01)]
    assert found == ["before", "before-stream"]


def zoo(*words: object) -> Any:
    return CliRunner().invoke(app, ["zoo", NAME, *map(str, words)])


def test_command_fails_for_regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "vllm"
    source.mkdir()
    (source / "__init__.py").write_text("")

    def starving(_: str) -> Any:
        def run(incident: PackagedIncident, variant: str) -> RunFigures:
            found = port(incident, variant)
            return replace(found, verdict="starved", detail="1 of 2: request 1")

        return run

    monkeypatch.setattr(source_comparison, "run_on_source", lambda _: port)
    junit = tmp_path / "out.xml"
    same = zoo("--source", tmp_path, "--trust", "--junit", junit)
    assert same.exit_code == 0, same.output
    assert "2 unchanged" in same.stdout
    assert sum(suite.failures for suite in JUnitXml.fromfile(str(junit))) == 0
    monkeypatch.setattr(source_comparison, "run_on_source", starving)
    worse = zoo("--source", tmp_path, "--trust", "--junit", junit)
    assert worse.exit_code == 1
    assert f"REGRESSION: {NAME}, after: served by the newest release, starved" in worse.stdout
    assert sum(suite.failures for suite in JUnitXml.fromfile(str(junit))) == 2
    answer = json.loads(zoo("--source", tmp_path, "--trust", "--json").stdout)
    assert not answer["ok"]
    assert [one["judgement"] for one in answer["comparisons"]] == ["worse", "worse"]


def test_command_rejects_bad_source(tmp_path: Path) -> None:
    for words, message in (
        (("--source", tmp_path), "review it, then pass --trust"),
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
