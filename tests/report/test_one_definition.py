"""Tests that a name denotes one metric on the console and the page, and in files, sweeps, plans and
expectations.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import simkv
from simkv.core.figure_registry import (
    METRICS,
    STATISTICS,
    figure,
    is_lower_bound,
)
from simkv.metrics.expectation_checks import check_expectations
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file
from simkv.report.console_details import render_full_results
from simkv.report.console_summary import build_variants_table
from simkv.report.page_text import build_page_text
from simkv.report.run_files import write_run
from simkv.study.whatif.outcome_predicate import parse_condition
from simkv.study.whatif.trial_evaluation import Evaluator

#: In one run, some requests finish, some receive only a first token, and some receive none. In
#: another run, no request finishes.
TIMEOUTS = {"some": 0.9, "none": 0.05}


def document(timeout: float) -> dict[str, Any]:
    burst = {"num_prompts": 12, "interval": 0.02, "prompt_tokens": 40, "output_tokens": 20}
    return {
        "name": "giving-up",
        "workload": {"burst": burst},
        "profile": "p.json",
        "engine": {"name": "vllm", "num_gpu_blocks": 12, "max_model_len": 100, "max_num_seqs": 8},
        "timeout": timeout,
    }


@pytest.fixture(scope="module", params=TIMEOUTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.metrics.test_fidelity import PROFILE

    folder = tmp_path_factory.mktemp(request.param)
    (folder / "p.json").write_text(json.dumps(PROFILE))
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(document(TIMEOUTS[request.param])))
    return path


@pytest.fixture(scope="module")
def result(path: Path) -> RunResult:
    return run_file(path)["run"]


def labels() -> dict[str, str]:
    """Return the key of every metric by its label and its headings."""
    found = {}
    for key, metric in METRICS.items():
        for label in (metric.label, metric.heading, metric.heading_in_seconds):
            found[label.lower()] = key
            found[label.lower().replace("e2e ", "e2el ")] = key
    return found


def shown(result: RunResult, key: str, value: str) -> bool:
    """Return whether a text is the value of this metric in ``summary.json``, with any rounding."""
    found, metric = figure(result.summary, key), METRICS[key]
    if found is None:
        return value == "none"
    bound = "> " if is_lower_bound(result.summary, key) else ""
    said = {
        metric.format(found),
        f"{found:.2f}" if isinstance(found, float) else str(found),
        simkv.core.figure_registry.format_number(metric.to_seconds(found)),
    }
    return value in {bound + one for one in said}


def test_figures_follow_from_the_rows(result: RunResult, path: Path) -> None:
    """Each metric is recomputed over finished requests, and over all requests."""
    write_run(path.parent / "out", {"run": result}, [], lambda _: None)
    with (path.parent / "out" / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    written = json.loads((path.parent / "out" / "summary.json").read_text())["variants"]["run"]
    lives = result.record.requests
    for group, column, key in (
        ("ttft_ms", "ttft_s", "ttft_all_ms"),
        ("e2e_ms", "e2e_s", "e2e_all_ms"),
    ):
        done = [1e3 * float(row[column]) for row in rows if row["outcome"] == "finished"]
        waited = {i: one.ended_at - one.request.arrival for i, one in lives.items()}  # type: ignore[operator]
        every = [1e3 * float(row[column] or waited[int(row["id"])]) for row in rows]
        for values, name in ((done, group), (every, key)):
            if values:
                assert written[name]["mean"] == pytest.approx(np.mean(values))
            for share, statistic in ((50, "median"), (90, "p90"), (95, "p95"), (99, "p99")):
                wanted = np.percentile(values, share) if values else None
                assert figure(written, f"{name}.{statistic}") == pytest.approx(wanted)
        assert written[key]["censored"] == sum(not row[column] for row in rows)
    assert figure(written, "ttft_all_ms.p99") != figure(written, "ttft_ms.p99")


def test_console_shows_figures_of_the_summary(result: RunResult) -> None:
    by_label = labels()
    columns = {
        column.heading.lower(): column.cells[0]
        for column in build_variants_table({"run": result}).columns
    }
    seen = {by_label[label] for label in columns if label in by_label} - {"finished"}
    assert {"ttft_all_ms.mean", "ttft_all_ms.p99", "e2e_all_ms.mean", "makespan_s"} <= seen
    assert not any(key.startswith(("ttft_ms", "e2e_ms")) for key in seen)
    for label, cell in columns.items():
        if label in by_label and label != "finished":
            assert shown(result, by_label[label], cell), (label, cell)


def lines(result: RunResult) -> Iterator[tuple[str, str]]:
    for part in render_full_results({"run": result}, [], []):
        if isinstance(part, str) and ":  " in part:
            label, _, value = part.partition(":  ")
            yield label.strip().lower(), value.strip()


def test_full_console_shows_figures_of_the_summary(result: RunResult) -> None:
    by_label, seen = labels(), set()
    for label, value in lines(result):
        if key := by_label.get(label):
            seen.add(key)
            assert shown(result, key, value), (label, value)
    wanted = {
        f"{group}.{name}" for group in ("ttft_ms", "ttft_all_ms", "itl_ms") for name in STATISTICS
    }
    assert wanted <= seen


def test_page_shows_figures_of_the_summary(result: RunResult) -> None:
    found, by_label = build_page_text({"run": result}, ["run"]), labels()
    cells = found["variants"][0]["cells"]
    for heading, cell in zip(found["columns"], cells, strict=True):
        key = by_label[heading.lower()]
        if key != "finished":
            assert shown(result, key, cell), (heading, cell)
    assert "P99 TTFT of all requests (s)" in found["columns"]


def test_sweeps_and_what_if_use_figures_of_the_summary(result: RunResult, path: Path) -> None:
    swept = simkv.sweep(path, {"engine.max_num_seqs": [8]}, jobs=1).iloc[0]
    plan = simkv.plan(
        path,
        smallest="engine.max_num_seqs=8",
        objectives=["ttft_ms.p99<=500", "ttft_all_ms.p99<=500"],
        repeats=1,
        cliff=False,
        jobs=1,
    )
    planned = plan.evaluations.iloc[0]
    frame = simkv.run(path).figures["run"]
    with Evaluator(path.parent) as evaluator:
        whatif = evaluator.evaluate(evaluator.job(result.scenario))
    for key in METRICS:
        value = figure(result.summary, key)
        for table in (swept, planned, frame):
            found = table[key]
            missing = found is None or found != found
            assert (None if missing else found) == value, key
        assert whatif.values[key] == value, key
        if value is None:
            assert not parse_condition(f"{key}<=1e9").is_met(whatif)
    standing = {str(held.objective): held.value for held in plan.plans["run"].objectives}
    for key in ("ttft_ms.p99", "ttft_all_ms.p99"):
        assert standing[f"{key} <= 500"] == figure(result.summary, key)


def test_expectations_use_figures_of_the_summary(result: RunResult, path: Path) -> None:
    values = {key: figure(result.summary, key) for key in METRICS}
    bounds = {key: {"le": 1e9} if value is None else value for key, value in values.items()}
    other = path.with_name("expecting.yaml")
    tree = {**yaml.safe_load(path.read_text()), "expect": {"run": bounds}}
    other.write_text(yaml.safe_dump(tree))
    found = {one.figure: one for one in check_expectations(run_file(other))}
    assert set(found) == set(METRICS)
    for key, value in values.items():
        assert found[key].found == value
        assert found[key].ok == (value is not None), "a missing latency keeps to no bound"
