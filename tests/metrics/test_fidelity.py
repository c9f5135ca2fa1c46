"""Tests of error estimates of simulations from the errors of their cost profiles."""

from __future__ import annotations

import json
from math import hypot, sqrt
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.core.figure_registry import figure
from simkv.costs.cost_profile import CostProfile, ErrorSource, StepError
from simkv.costs.profile_uncertainty import compute_scales, error_ends
from simkv.costs.scaled_executor import ErrorSide, ScaledExecutor, StepKind, classify_step
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.costs.step_load import StepLoad
from simkv.metrics.fidelity import (
    INTERVAL_FIGURES,
    Fidelity,
    find_step_errors,
    mark_step_times,
    warn_mixed_bases,
)
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file

SCENARIO = """
name: short
profile: p.json
workload:
  arrivals: {num_prompts: 30, request_rate: 9.0, prompt_tokens: 40, output_tokens: 20}
engine: {name: vllm, num_gpu_blocks: 20, max_model_len: 100, max_num_seqs: 8}
"""
PROFILE: dict[str, Any] = {
    "name": "p",
    "engine": "e",
    "model": "m",
    "gpu": "g",
    "basis": "measured",
    "terms": [
        {"name": "step", "feature": "steps", "seconds": 0.01},
        {"name": "prompt", "feature": "prefill_tokens", "seconds": 0.001},
        {"name": "context", "feature": "decode_context", "seconds": 1e-5},
    ],
    "idle_pass_s": 1e-5,
    "range": {},
    "fit": {"points": 9},
    "source": [],
}


def error(p95: float) -> dict[str, float]:
    return {"points": 50, "median": p95 / 3, "p95": p95, "bias": 0.0}


def run(folder: Path, text: str = SCENARIO, **changes: Any) -> RunResult:
    (folder / "s.yaml").write_text(text)
    (folder / "p.json").write_text(json.dumps({**PROFILE, **changes}))
    return run_file(folder / "s.yaml")["run"]


def test_profile_without_errors_has_no_intervals(tmp_path: Path) -> None:
    found = run(tmp_path).fidelity
    assert found.intervals == {}
    assert "error on held-out steps is unknown" in found.note


def test_intervals_contain_run_and_scaled_re_runs(tmp_path: Path) -> None:
    fit = {"points": 9, "held_out": {"decode": error(0.02), "prefill": error(0.1)}}
    result = run(tmp_path, fit=fit, basis="composed of measured operators")
    found = result.fidelity
    assert set(found.intervals) == set(INTERVAL_FIGURES)
    for name, (low, high) in found.intervals.items():
        assert low <= figure(result.summary, name) <= high
    low, high = found.intervals["e2e_ms.p99"]
    assert low < 0.98 * figure(result.summary, "e2e_ms.p99")
    assert high > 1.02 * figure(result.summary, "e2e_ms.p99")
    # A device that is slower by exactly the error is inside the interval; a slower device is
    # outside.
    slower = run(tmp_path, terms=[{**t, "seconds": 1.015 * t["seconds"]} for t in PROFILE["terms"]])
    for name in ("makespan_s", "tpot_ms.mean", "e2e_ms.mean"):
        low, high = found.intervals[name]
        assert low <= figure(slower.summary, name) <= high
    far = run(tmp_path, terms=[{**t, "seconds": 1.3 * t["seconds"]} for t in PROFILE["terms"]])
    assert figure(far.summary, "e2e_ms.mean") > found.intervals["e2e_ms.mean"][1]


def test_errors_of_single_steps_cancel_out_in_a_run_but_their_bias_does_not(tmp_path: Path) -> None:
    def half(p95: float, bias: float, basis: str = "measured") -> float:
        errors = {"all": {**error(p95), "bias": bias}}
        one = SCENARIO.replace("num_prompts: 30", "num_prompts: 1")
        fit = {"points": 50, "held_out": errors}
        found = run(tmp_path, one, fit=fit, basis=basis).fidelity
        low, high = found.intervals["tpot_ms.mean"]
        return (high - low) / (high + low)

    assert half(0.2, 0.0) == pytest.approx(hypot(0.03, 0.2 / sqrt(50)), rel=0.1)
    assert half(0.2, 0.1) == pytest.approx(hypot(0.03, 0.1 + 0.2 / sqrt(50)), rel=0.1)
    assert half(0.2, 0.0, "assumed") == pytest.approx(0.2, rel=0.1)  # all steps have equal errors
    assert StepError(**{**error(0.2), "points": 0}).lasting == 0.2  # the error as given
    assert StepError(**{**error(0.2), "bias": 0.19}).lasting == 0.2


def test_scenario_can_select_one_end_of_the_error(tmp_path: Path) -> None:
    fit = {"points": 9, "held_out": {"all": error(0.05)}, "beyond": {"decode_seqs": 0.2}}
    inside = {"range": {"decode_seqs": [1, 1]}, "fit": fit}
    low, high = run(tmp_path, **inside).fidelity.intervals["e2e_ms.mean"]
    found = [
        run(tmp_path, f"{SCENARIO}step_scale: {{error: {side}}}\n", **inside)
        for side in ("faster", "slower")
    ]
    assert [figure(one.summary, "e2e_ms.mean") for one in found] == [low, high]
    with pytest.raises(
        InputError,
        match=r"the error of the step times is unknown for profile p "
        r".measured.",
    ):
        run(tmp_path, f"{SCENARIO}step_scale: {{error: slower}}\n")


def test_intervals_do_not_change_the_run(tmp_path: Path) -> None:
    plain = run(tmp_path)
    erring = run(tmp_path, fit={"points": 9, "held_out": {"all": error(0.05)}})
    assert plain.record.steps == erring.record.steps
    strip = {"fidelity": None}
    assert plain.summary | strip == erring.summary | strip


def test_share_outside_the_range_counts_each_step_once(tmp_path: Path) -> None:
    # every prefill error is counted twice
    beyond = {"prefill_tokens": [1, 2], "prefill_seqs": [50, 60]}
    result = run(tmp_path, range=beyond, fit={"points": 9, "held_out": {"all": error(0.05)}})
    log = result.record.steps
    steps = list(zip(log.start, log.end, log.prefill_seqs, strict=True))
    wanted = sum(b - a for a, b, n in steps if n) / sum(b - a for a, b, _ in steps)
    assert 0.1 < wanted < 0.9
    assert result.fidelity.outside == pytest.approx(wanted)
    assert "was outside the profile's range" in result.fidelity.note


def test_note_is_printed_and_written(tmp_path: Path) -> None:
    run(tmp_path, fit={"points": 9, "held_out": {"all": error(0.05)}})
    arguments = [
        "run",
        str(tmp_path / "s.yaml"),
        "--out",
        str(tmp_path / "out"),
        "--no-plots",
        "--full",
    ]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "maximum error of 95 % of steps: all 5.0 %" in done.output
    assert "Mean E2EL (ms)" in done.output.partition("Fidelity:")[2]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    written = summary["variants"]["run"]["fidelity"]
    assert written["intervals"]["makespan_s"][0] < summary["variants"]["run"]["makespan_s"]
    assert written["step_errors"]["all"]["p95"] == 0.05


def test_scale_prefers_the_error_of_the_step_kind() -> None:
    errors = {"decode": StepError(**error(0.25)), "all": StepError(**error(0.6))}

    def scales(errors: dict[str, StepError], side: ErrorSide) -> dict[StepKind, float]:
        return compute_scales([ErrorSource(name="costs", ends=error_ends(errors))], side)

    assert scales(errors, "faster")["decode"] == pytest.approx(1 / 1.25)
    assert scales(errors, "slower")["decode"] == pytest.approx(1 / 0.75)
    assert scales(errors, "slower")["mixed"] == pytest.approx(1 / 0.4)
    assert scales({"decode": errors["decode"]}, "faster")["prefill"] == pytest.approx(1 / 1.25)
    assert scales({"all": StepError(**error(3.0))}, "slower")["prefill"] == pytest.approx(10.0)


def test_scaled_executor_leaps_as_it_steps() -> None:
    inner = SimulatedExecutor(CostProfile.model_validate(PROFILE))
    erring = ScaledExecutor(inner, {"decode": 1.1, "prefill": 1.2, "mixed": 1.3})
    load = StepLoad(0, 0, 0, 4, 100)
    foreseen = erring.forecast_steps(load, 3)
    loads = [StepLoad(0, 0, 0, 4, 100 + 4 * step) for step in (1, 2, 3)]
    assert list(foreseen) == [erring.run(later) for later in loads]
    assert erring.run(StepLoad(1, 10, 0, 4, 100, 55)) == 1.3 * inner.run(
        StepLoad(1, 10, 0, 4, 100, 55)
    )
    assert [classify_step(StepLoad(1, 9, 0, 0, 0)), classify_step(load)] == ["prefill", "decode"]


def test_unknown_error_gives_no_interval_and_a_note(tmp_path: Path) -> None:
    fit = {"points": 9, "held_out": {"decode": error(0.02), "prefill": error(0.02)}}
    narrow = {"decode_context": [1, 50]}
    found = run(tmp_path, fit=fit, range=narrow).fidelity
    assert found.intervals == {}
    assert "where the error is unknown, so no metric has an interval" in found.note
    known = run(tmp_path, fit={**fit, "beyond": {"decode_context": 0.1}}, range=narrow).fidelity
    inside = run(tmp_path, fit=fit).fidelity
    assert "widen with the distance" in known.note
    for wide, tight in zip(
        known.intervals["e2e_ms.mean"], inside.intervals["e2e_ms.mean"], strict=True
    ):
        middle = sum(inside.intervals["e2e_ms.mean"]) / 2
        assert abs(wide - middle) > 1.2 * abs(tight - middle)


def test_note_on_a_small_share_with_unknown_error(tmp_path: Path) -> None:
    fit = {"points": 9, "held_out": {"all": error(0.02)}}
    log = run(tmp_path).record.steps
    prefills = sorted(log.prefill_tokens)
    found = run(tmp_path, fit=fit, range={"prefill_tokens": [1, prefills[-1] - 1]}).fidelity
    assert 0.0 < found.outside < 0.05
    assert found.note.endswith(
        f"; {100 * found.outside:.1f} % of the busy time was outside the profile's range, where "
        "the error is unknown"
    )
    assert found.intervals


def test_mark_names_the_basis_and_the_typical_error() -> None:
    """The median is the typical error. An unknown error is named, and mixed bases are reported."""
    errors = {
        "prefill": StepError(points=27, median=0.114, p95=0.86, bias=0.0),
        "decode": StepError(points=27, median=0.037, p95=0.61, bias=0.0),
    }
    assert find_step_errors(errors) == (0.114, 0.86)
    composed = mark_step_times("composed of measured operators", errors)
    assert composed == "composed ±11 %"
    assert mark_step_times("estimated from the data sheet", errors) == "data sheet ±11 %"
    assumed = mark_step_times("assumed", {})
    assert assumed == "assumed, error unknown"
    assert warn_mixed_bases([composed, "composed ±30 %"]) == []
    (line,) = warn_mixed_bases([composed, assumed])
    assert "(assumed, composed)" in line


def test_upper_end_of_a_growing_queue_says_that_it_saturates(tmp_path: Path) -> None:
    """With slower steps the load exceeds the capacity, so the end depends on the run's length."""

    def fidelity(rate: float) -> Fidelity:
        text = SCENARIO.replace("num_prompts: 30", "num_prompts: 400")
        (tmp_path / "s.yaml").write_text(text.replace("request_rate: 9.0", f"request_rate: {rate}"))
        profile = {**PROFILE, "fit": {"points": 9, "held_out": {"all": error(0.6)}}}
        (tmp_path / "p.json").write_text(json.dumps(profile))
        return run_file(tmp_path / "s.yaml")["run"].fidelity

    calm, full = fidelity(0.05), fidelity(9.0)
    show = "{:.0f} ms".format
    assert calm.saturated == {}
    assert "saturates" not in calm.of("ttft_ms.p99", show)
    assert full.of("ttft_ms.p99", show).endswith(" ms (saturates with slower steps)")
    assert "saturates" not in full.of("makespan_s", show)


def test_intervals_include_the_error_of_packaged_times_of_the_api_server(tmp_path: Path) -> None:
    """With 200 short prompts at once, the API server sets the TTFT: half and twice its time."""
    text = """
name: burst
hardware: {gpu: H100, model: Qwen3-14B}
workload: {burst: {num_prompts: 200, prompt_tokens: 10, output_tokens: 1}}
engine: {name: vllm, variant: "0.11.0", num_gpu_blocks: 4000, max_model_len: 100}
"""
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text(text + "front_end: {request_ms: 10, latency_ms: 5}\n")
    packaged, given = (run_file(tmp_path / name)["run"] for name in ("a.yaml", "b.yaml"))
    low, high = packaged.fidelity.intervals["ttft_ms.p99"]
    most = packaged.summary["ttft_ms"]["p99"]
    assert low is not None
    assert high is not None
    assert high / most == pytest.approx(2.0, rel=0.1)
    assert low / most == pytest.approx(0.5, rel=0.1)
    low, high = given.fidelity.intervals["ttft_ms.p99"]
    assert low is not None
    assert high is not None
    assert high / low < 1.2
