"""Tests of recorded runs with published statistics only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.validation.recorded_runs.recorded_run import read_recorded_run
from simkv.validation.recorded_runs.run_scores import score
from simkv.validation.recorded_runs.run_simulation import engine_of, simulate_run
from tests.validation.test_recorded_runs import FACTS, profile

ARRIVALS = {
    "num_prompts": 40,
    "request_rate": 6.0,
    "prompt_tokens": {"distribution": "lognormal", "mean": 300},
    "output_tokens": 60,
    "seed": 3,
}


def case(folder: Path, **facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "case.json").write_text(json.dumps({**FACTS, **facts}))
    return folder


def truth(folder: Path, **facts: Any) -> dict[str, dict[str, float]]:
    """Return the statistics of a simulation with the true costs."""
    read = read_recorded_run(
        case(folder, arrivals=ARRIVALS, measured={"e2e_ms": {"mean": 1.0}}, **facts)
    )
    times = simulate_run(read, profile(), *engine_of(read)).requests
    return {
        metric: {
            "mean": times[metric].mean(),
            "median": times[metric].quantile(0.5),
            "p99": times[metric].quantile(0.99),
            "max": times[metric].max(),
        }
        for metric in ("ttft_ms", "e2e_ms")
    }


def test_statistics_are_compared_with_the_simulation(tmp_path: Path) -> None:
    measured = truth(tmp_path / "x")
    measured["ttft_ms"]["p99"] *= 1.25
    read = read_recorded_run(case(tmp_path / "x", arrivals=ARRIVALS, measured=measured))
    found = score(read, simulate_run(read, profile(), *engine_of(read)), "truth")
    errors = {f.name: f.error_pct for f in found.figures}
    assert set(errors) == {
        f"{m}.{s}" for m in ("ttft_ms", "e2e_ms") for s in ("mean", "p50", "p99")
    }
    assert errors.pop("ttft_ms.p99") == pytest.approx(-20.0)
    assert all(abs(error) < 1e-9 for error in errors.values())
    assert found.per_request == []
    notes = " ".join(found.replayed.notes)
    assert "only statistics are published" in notes
    assert "sampled from the published statistics with seed 3" in notes


def test_lengths_may_be_known_without_times(tmp_path: Path) -> None:
    read = read_recorded_run(
        case(tmp_path / "x", arrivals=ARRIVALS, measured=truth(tmp_path / "x"))
    )
    read.requests[["arrival_s", "prompt_tokens", "output_tokens"]].to_csv(
        tmp_path / "x" / "requests.csv", index=False
    )
    again = read_recorded_run(case(tmp_path / "x", measured=truth(tmp_path / "y")))
    assert again.table.name == "requests.csv"
    found = score(again, simulate_run(again, profile(), *engine_of(again)), "truth")
    assert abs(found.figure("e2e_ms", "mean").error_pct) < 1e-6
    # Without statistics, the times of requests are required.
    with pytest.raises(InputError, match=r"requests.csv: missing column 'ttft_ms'"):
        read_recorded_run(case(tmp_path / "x"))


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"measured": {}}, r"case.json: measured: missing; without times of single requests"),
        ({"measured": {"ttf_ms": {"mean": 1}}}, r"unknown metric 'ttf_ms'.*ttft_ms"),
        ({"measured": {"ttft_ms": 3}}, r"measured.ttft_ms: should be an object"),
        ({"measured": {"ttft_ms": {"p98": 1}}}, r"measured.ttft_ms: unknown statistic 'p98'"),
        ({"measured": {"ttft_ms": {"mean": "x"}}}, r"ttft_ms.mean: must be a non-negative"),
        ({"arrivals": {"num_prompts": 3}}, r"arrivals.prompt_tokens: field required"),
    ],
)
def test_statistics_that_cannot_be_compared_are_named(
    tmp_path: Path, facts: Any, complaint: str
) -> None:
    known = {"arrivals": ARRIVALS, "measured": {"e2e_ms": {"mean": 1.0}}}
    with pytest.raises(InputError, match=complaint):
        read_recorded_run(case(tmp_path / "x", **{**known, **facts}))


def test_command_prints_and_writes_statistics_beside_other_cases(tmp_path: Path) -> None:
    folder = case(tmp_path / "x", arrivals=ARRIVALS, measured=truth(tmp_path / "x"))
    case(tmp_path / "y", name="other", arrivals=ARRIVALS, measured={"e2e_ms": {"p90": 900.0}})
    costs = tmp_path / "costs.json"
    costs.write_text(profile().model_dump_json())
    arguments = ["validate", str(folder), str(tmp_path / "y"), "--profile", str(costs)]
    docs = ["--host-times", "--sensitivity"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out"), *docs])
    assert done.exit_code == 0, done.output
    assert "not determined: " in done.output
    figures = pd.read_csv(tmp_path / "out" / "figures.csv")
    assert set(figures[figures["case"] == "other"]["statistic"]) == {"p90"}
