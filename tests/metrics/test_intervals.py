"""Tests that intervals contain their estimate, and exclude re-runs with other finished requests."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.figure_registry import (
    LATENCIES,
    OVER_ALL,
    STATISTICS,
    figure,
)
from simkv.core.outcome import Outcome
from simkv.metrics.intervals import INTERVAL_FIGURES, FigureInterval
from simkv.metrics.run_metrics import e2e, ttft
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario, StepScale
from tests.metrics.test_fidelity import PROFILE, error

ENGINES: list[dict[str, Any]] = [
    {"name": "vllm", "num_gpu_blocks": 12, "max_model_len": 100, "max_num_seqs": 8},
    {"name": "sglang", "max_total_num_tokens": 300},
    {"name": "mistralrs", "block_size": 8, "num_gpu_blocks": 24, "max_num_seqs": 4},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile")
    fit = {"points": 9, "held_out": {"all": error(0.4)}}
    (path / "p.json").write_text(json.dumps({**PROFILE, "basis": "assumed", "fit": fit}))
    return path


def scenario(timeout: float | None, **changes: Any) -> Scenario:
    burst = {"num_prompts": 10, "interval": 0.02, "prompt_tokens": 40, "output_tokens": 20}
    return Scenario.model_validate(
        {
            "name": "s",
            "profile": "p.json",
            "workload": {"burst": burst},
            "engine": ENGINES[0],
            "timeout": timeout,
            **changes,
        }
    )


def sides(asked: Scenario, folder: Path) -> list[RunResult]:
    """Return the re-runs, executed one by one."""
    scales = [StepScale(error=side) for side in ("faster", "slower")]
    return [
        run_scenario(asked.model_copy(update={"step_scale": scale}), folder, intervals=False)
        for scale in scales
    ]


def finished(result: RunResult) -> set[int]:
    return {i for i, one in result.record.requests.items() if one.outcome is Outcome.FINISHED}


@given(st.data())
@settings(max_examples=40)
def test_intervals_contain_their_estimate(folder: Path, data: st.DataObject) -> None:
    lengths = st.tuples(st.integers(1, 60), st.integers(1, 24), st.floats(0.0, 0.4))
    requests = data.draw(st.lists(lengths, min_size=1, max_size=9))
    asked = scenario(
        data.draw(st.floats(0.02, 2.0)),
        engine=data.draw(st.sampled_from(ENGINES)),
        workload={
            "requests": [
                {"prompt_tokens": prompt, "output_tokens": output, "arrival": arrival}
                for prompt, output, arrival in requests
            ]
        },
        horizon=data.draw(st.none() | st.floats(0.1, 1.0)),
    )
    result = run_scenario(asked, folder)
    runs = [result, *sides(asked, folder)]
    intervals, reasons = result.fidelity.intervals, result.fidelity.reasons
    assert set(intervals) == set(INTERVAL_FIGURES)
    for name, ends in intervals.items():
        values = [figure(run.summary, name) for run in runs]
        assert all(end is None or isfinite(end) for end in ends)
        assert (None in ends) == (name in reasons)
        if None in values:  # the run has no sample, and this differs from 0
            assert ends == (None, None)
        else:
            assert ends.contains(values[0])
            assert ends.low is None or ends.low == min(values)
    same = all(finished(run) == finished(result) for run in runs)
    for name in (f"{group}.{statistic}" for group in LATENCIES for statistic in STATISTICS):
        if not same:
            assert intervals[name] == (None, None)
    for latency, group in ((ttft, "ttft_all_ms"), (e2e, "e2e_all_ms")):
        lives = [life for run in runs for life in run.record.requests.values()]
        if any(latency(life) is None and life.outcome is Outcome.STARVED for life in lives):
            assert intervals[f"{group}.mean"].high is None
    json.dumps(result.summary, allow_nan=False)


def test_bounds_exclude_changed_sets_of_finished_requests(folder: Path) -> None:
    """Fewer requests finish in the slower re-run, so its mean cannot be a bound."""
    asked = scenario(1.0)
    result = run_scenario(asked, folder)
    faster, slower = sides(asked, folder)
    assert [len(finished(run)) for run in (faster, result, slower)] == [10, 7, 3]
    assert figure(slower.summary, "e2e_ms.mean") < figure(result.summary, "e2e_ms.p99")
    found = result.fidelity
    assert found.intervals["ttft_ms.mean"] == (None, None)
    assert found.of("ttft_ms.mean", "{:.2f}".format) == (
        "not determined (finished: 10 requests with faster steps, 7 in the run, 3 with slower "
        "steps)"
    )
    low, high = found.intervals["e2e_all_ms.mean"]
    assert (low, high) == (figure(faster.summary, "e2e_all_ms.mean"), None)
    assert found.of("e2e_all_ms.mean", "{:.2f}".format) == (
        f"at least {low:.2f} (no complete answer: 0 requests with faster steps, 3 in the run, 7 "
        "with slower steps)"
    )
    assert found.intervals["starved"] == (0.0, 7.0)
    assert found.intervals["finished"] == (3.0, 10.0)


def test_run_without_finished_requests_has_no_latency(
    folder: Path,
) -> None:
    result = run_scenario(scenario(0.02), folder)
    assert result.summary["finished"] == 0
    for group in LATENCIES:
        assert figure(result.summary, f"{group}.p99") is None
        assert result.fidelity.intervals[f"{group}.p99"] == (None, None)
    assert result.fidelity.reasons["ttft_ms.mean"] == "no request has this latency"
    assert result.fidelity.intervals["output_throughput"] == (0.0, 0.0)


def test_both_ends_are_known_if_the_same_requests_finish(folder: Path) -> None:
    asked = scenario(None)
    result = run_scenario(asked, folder)
    runs = [result, *sides(asked, folder)]
    assert result.fidelity.reasons == {}
    for name in ("ttft_ms.mean", "ttft_all_ms.p99", "makespan_s", "longest_stall_s"):
        values = [figure(run.summary, name) for run in runs]
        assert result.fidelity.intervals[name] == (min(values), max(values))
    for group, key in OVER_ALL.items():
        assert result.fidelity.intervals[f"{key}.mean"] == pytest.approx(
            result.fidelity.intervals[f"{group}.mean"]
        )


def test_cut_off_run_has_a_lower_bound_of_makespan(folder: Path) -> None:
    result = run_scenario(scenario(None, horizon=0.9), folder)
    assert result.summary["cut_off"] > 0
    low, high = result.fidelity.intervals["makespan_s"]
    assert (low, high) == (pytest.approx(0.9), None)


def test_interval_as_text() -> None:
    show = "{:.0f}".format
    assert FigureInterval(1.0, 2.0).text(show) == "from 1 to 2"
    assert (
        FigureInterval(404.54, None).text("{:.2f}".format, "cut off") == "at least 404.54 (cut off)"
    )
    assert FigureInterval(None, None).text(show) == "not determined"
    assert [FigureInterval(2.0, end).contains(1.0) for end in (3.0, None)] == [False, False]
    assert FigureInterval(2.0, 2.0).is_certain
    assert not FigureInterval(None, None).is_certain
