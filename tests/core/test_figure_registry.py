"""Tests of the registry of metrics: it has every number of a summary once and formats it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.figure_registry import (
    FIGURE_NAMES,
    METRICS,
    SESSION_METRICS,
    figure,
    format_number,
    format_seconds,
    heading,
)
from simkv.core.outcome import FAILURES, SERVED, Outcome
from simkv.metrics.expectation_checks import check_expectations
from simkv.metrics.run_metrics import summarize
from simkv.metrics.scenario_runner import run_file
from simkv.scenario.objectives import compute_objective_figures, parse_objective
from simkv.study.sweep.sweep_table import flatten_figures

TEXT = "name: t\nworkload: {burst: {num_prompts: 3, prompt_tokens: 9, output_tokens: 4}}\n"
ENGINE = "engine: {name: vllm, num_gpu_blocks: 20, startup_check: false}\nprofile: unit-step\n"


def leaves(node: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        name
        for key, value in node.items()
        for name in (leaves(value, f"{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


def test_registry_matches_numbers_of_summary(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(TEXT + ENGINE)
    figures = summarize(run_file(tmp_path / "s.yaml")["run"].record)
    words = ("verdict", "verdict_detail", "ttft_all_ms.at_least", "e2e_all_ms.at_least")
    told = [name for name in leaves(figures) if name not in words]
    assert set(told) == set(FIGURE_NAMES)
    assert all(isinstance(figure(figures, name), int | float) for name in FIGURE_NAMES)


def test_labels_are_unique() -> None:
    assert len({metric.heading for metric in METRICS.values()}) == len(METRICS)


@pytest.mark.parametrize(
    ("name", "value", "head", "head_s", "said"),
    [
        ("ttft_ms.p99", 420.0, "P99 TTFT (ms)", "P99 TTFT (s)", "0.42 s"),
        ("itl_ms.median", 16.0, "Median ITL (ms)", "Median ITL (s)", "16 ms"),
        ("makespan_s", 1234.5, "Makespan (s)", "Makespan (s)", "1,234 s"),
        ("output_throughput", 99.96, *["Output token throughput (tok/s)"] * 2, "100.0 tok/s"),
        ("cut_off", 3, "Cut off", "Cut off", "3"),
        ("jain_index", 0.5, "Jain index of speed", "Jain index of speed", "0.50"),
    ],
)
def test_formats_figures(name: str, value: float, head: str, head_s: str, said: str) -> None:
    metric = METRICS[name]
    assert (metric.heading, metric.heading_in_seconds, metric.format(value)) == (head, head_s, said)
    assert heading(name) == head
    assert heading("goodput_share") == "goodput_share"  # derived metrics, not in summary.json


def test_formats_numbers_with_three_digits() -> None:
    assert [format_number(x) for x in (0.123, 1.234, 12.34, 123.4, 1234.5, 7.0)] == [
        "0.12",
        "1.23",
        "12.3",
        "123",
        "1,234",
        "7",
    ]
    assert [format_seconds(x) for x in (0.0, 0.0123, 1.5)] == ["0 s", "12.3 ms", "1.50 s"]


def test_every_outcome_is_served_or_failure() -> None:
    assert {*SERVED, *FAILURES} == set(Outcome)
    assert [outcome.word for outcome in FAILURES if "_" in outcome] == ["timed out", "cut off"]
    assert {outcome.wasted_wait_label for outcome in Outcome} == {
        None,
        "starved",
        "timed_out",
        "failed",
    }


def test_metrics_of_sessions_are_those_of_the_summary(tmp_path: Path) -> None:
    load = "{num_sessions: 2, turns: 2, request_rate: 1, prompt_tokens: 9, output_tokens: 4}"
    text = f"name: t\nworkload: {{sessions: {load}, session_deadline: 99, max_sessions: 2}}\n"
    (tmp_path / "s.yaml").write_text(text + ENGINE)
    summary = run_file(tmp_path / "s.yaml")["run"].summary
    values = {name: figure(summary, name) for name in SESSION_METRICS}
    assert values["sessions.finished"] == 2
    assert values["sessions.turn_ms.p95"] == summary["sessions"]["turn_ms"]["p95"] > 0
    assert values["sessions.start_wait_ms.p95"] == 0.0  # no session waits: not a missing value
    assert all(value is not None for value in values.values())
    assert (
        compute_objective_figures(summary)["sessions.resume_tax"] == values["sessions.resume_tax"]
    )
    assert parse_objective("sessions.turn_ms.p95<=9000").holds(compute_objective_figures(summary))
    assert flatten_figures(summary)["sessions.makespan_ms.mean"] == pytest.approx(
        values["sessions.makespan_ms.mean"]
    )
    del summary["sessions"]["met_deadline_share"]
    assert figure(summary, "sessions.met_deadline_share") is None
    summary["sessions"]["turn_ms"]["mean"] = 0.0
    assert figure(summary, "sessions.turn_ms.p95") is None
    del summary["sessions"]
    assert figure(summary, "sessions.turn_ms.p95") is None
    assert figure(summary, "sessions.resume_tax") is None


def test_sessions_can_be_expected(tmp_path: Path) -> None:
    load = "{num_sessions: 2, turns: 2, request_rate: 1, prompt_tokens: 9, output_tokens: 4}"
    bounds = "{sessions.finished: 2, sessions.turn_ms.p95: {le: 1}}"
    text = f"name: t\nworkload: {{sessions: {load}}}\nexpect: {{run: {bounds}}}\n"
    (tmp_path / "s.yaml").write_text(text + ENGINE)
    found = check_expectations(run_file(tmp_path / "s.yaml"))
    assert {check.figure: check.ok for check in found} == {
        "sessions.finished": True,
        "sessions.turn_ms.p95": False,
    }
