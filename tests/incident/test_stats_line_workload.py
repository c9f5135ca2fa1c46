"""Tests of requests sampled from statistics lines alone, compared with the real requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simkv.core.errors import InputError
from simkv.incident import diagnose_stages
from simkv.incident.emit.emitted_files import emit
from simkv.incident.evidence import Evidence
from simkv.incident.incident_simulation import request_times
from simkv.incident.log_windows import build_windows, series_from_steps
from simkv.incident.server_setup import UserSettings
from simkv.incident.source_reader import read_source
from simkv.incident.stats_line_workload import OUTPUT_VARIATIONS, KnownEngine, sample_from_lines
from simkv.incident.workload_ensemble import interval
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.vllm.config import VllmConfig

HERE = Path(__file__).parents[2] / "scenarios"
LOAD = {
    "num_prompts": 150,
    "request_rate": 2.5,
    "prompt_tokens": {"distribution": "lognormal", "mean": 600, "sigma": 0.8, "max": 4000},
    "output_tokens": {"distribution": "lognormal", "mean": 150, "sigma": 0.6, "max": 600},
    "seed": 3,
}
ENGINES = {
    "vllm": {"name": "vllm", "variant": "0.19.0", "num_gpu_blocks": 400, "max_model_len": 5000},
    "sglang": {"name": "sglang", "variant": "0.5.23", "max_total_num_tokens": 20000},
}
TOKENS = {"vllm": 6400.0, "sglang": 20000.0}


def served(engine: str, folder: Path, also: str = "", **knobs: object) -> tuple[RunResult, Path]:
    """Return a run and its server's log without lines about single requests.

    ``also`` selects a kind of log with such lines, by the end of its name.
    """
    document = {
        "name": "lines",
        "workload": {"arrivals": LOAD},
        "engine": ENGINES[engine] | knobs,
        "profile": "assumed-costs.json",
    }
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "lines.yaml", document)).values()))
    result = run_scenario(scenario, HERE, intervals=False)
    path = emit(folder, {"run": result}, (f"{engine}-log{also}",))[0]
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in lines if '"event"' not in line))
    return result, path


@pytest.fixture(scope="module", params=list(ENGINES))
def log(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, RunResult, Evidence]:
    engine = request.param
    result, path = served(engine, tmp_path_factory.mktemp(engine))
    found = read_source(path)
    assert found.requests is None
    return engine, result, found


def drawn(log: tuple[str, RunResult, Evidence], seed: int) -> pd.DataFrame:
    """Return a member of the ensemble that agrees with the log."""
    engine, _, evidence = log
    assert evidence.series is not None
    known = KnownEngine(TOKENS[engine], 16 if engine == "vllm" else 1, 5000)
    return sample_from_lines(evidence.series, known, seed)


def test_windows_have_all_tokens(log: tuple[str, RunResult, Evidence]) -> None:
    engine, result, evidence = log
    assert evidence.series is not None
    cut = build_windows(evidence.series, TOKENS[engine])
    lives = result.record.requests.values()
    assert cut.prompt.sum() == pytest.approx(sum(life.request.prompt_tokens for life in lives))
    assert cut.output.sum() == pytest.approx(sum(life.tokens for life in lives), rel=0.01)
    assert (np.diff(cut.end) >= cut.width[1:] - 1e-6).all()
    if engine == "sglang":
        assert cut.firsts.sum() == len(lives)
    else:
        assert np.isnan(cut.firsts).all()


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_member_agrees_with_the_lines(log: tuple[str, RunResult, Evidence], seed: int) -> None:
    engine, result, _ = log
    member, true = drawn(log, seed), request_times(result.record)
    lives = list(result.record.requests.values())
    near = 0.03 if engine == "sglang" else 0.25  # the lines report the number of requests
    assert len(member) == pytest.approx(len(lives), rel=near)
    prompts = sum(life.request.prompt_tokens for life in lives)
    assert member["prompt_tokens"].sum() == pytest.approx(prompts, rel=0.01)
    outputs = sum(life.tokens for life in lives)
    assert member["output_tokens"].sum() == pytest.approx(outputs, rel=0.05)
    assert member["e2e_ms"].mean() == pytest.approx(true["e2e_ms"].mean(), rel=0.25)
    assert (member["queue_ms"] > -1e-3).all()
    assert member["t_s"].is_monotonic_increasing


def test_members_differ_and_are_reproducible(log: tuple[str, RunResult, Evidence]) -> None:
    assert drawn(log, 3).equals(drawn(log, 3))
    sizes = {len(drawn(log, place)) for place in range(len(OUTPUT_VARIATIONS))}
    assert len(sizes) == (1 if log[0] == "sglang" else len(OUTPUT_VARIATIONS))


def test_log_alone_is_rebuilt_and_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the other requests take their own time
    monkeypatch.setattr("simkv.incident.ensemble_fit.MEMBERS", 4)
    result, path = served("vllm", tmp_path / "server")
    diagnose_stages.read_stage([path], tmp_path / "out")
    diagnose_stages.calibrate_stage(tmp_path / "out", UserSettings())
    members = pd.read_csv(tmp_path / "out" / "ensemble.csv")
    true = request_times(result.record)["e2e_ms"].mean() / 1e3
    low, high = interval(members["e2e"].tolist(), members["e2e_observed"].mean())
    assert low <= true <= high
    assert members["e2e"].mean() == pytest.approx(true, rel=0.2)
    assert members["apart"].is_monotonic_increasing
    found = diagnose_stages.explain_stage(tmp_path / "out", UserSettings(), try_flags=False)
    assert found.explained, found.text
    assert "a sampled request" in found.summary_lines[1]  # the log identifies no request


# the second kind of log also has the cache usage
@pytest.mark.parametrize("version", ["0.19.0", "0.33.0"])
def test_iterations_determine_the_number_of_requests(tmp_path: Path, version: str) -> None:
    result, path = served("vllm", tmp_path, "-iterations", variant=version)
    found = read_source(path)
    assert found.series is not None
    assert found.steps is not None
    config = result.scenario.engine
    assert isinstance(config, VllmConfig)
    lines = series_from_steps(found.steps, found.series, config.max_num_batched_tokens)
    member = sample_from_lines(lines, KnownEngine(6400.0, 16, 5000), 0)
    lives = list(result.record.requests.values())
    assert len(member) == pytest.approx(len(lives), rel=0.02)
    outputs = sum(life.tokens for life in lives)
    assert member["output_tokens"].sum() == pytest.approx(outputs, rel=0.03)
    true = request_times(result.record)
    assert member["e2e_ms"].mean() == pytest.approx(true["e2e_ms"].mean(), rel=0.08)


@pytest.mark.parametrize("version", ["0.11.0", "0.19.0"])  # the first kind of log also has prompts
def test_logged_arrivals_are_used(tmp_path: Path, version: str) -> None:
    result, path = served("vllm", tmp_path, "-requests", variant=version, num_gpu_blocks=320)
    found = read_source(path)
    assert found.series is not None
    member = sample_from_lines(found.series, KnownEngine(5120.0, 16, 5000), 0, found.arrivals)
    lives = sorted(result.record.requests.values(), key=lambda life: life.request.arrival)
    assert len(member) == len(lives)
    apart = np.diff(member["t_s"]) - np.diff([life.request.arrival for life in lives])
    assert np.abs(apart).max() <= 1.0  # times in a log are whole seconds
    if version == "0.11.0":
        told = [life.request.prompt_tokens for life in lives]
        assert member["prompt_tokens"].tolist() == told
    assert (member["output_tokens"] <= member["max_tokens"]).all()
    true = request_times(result.record)
    assert member["e2e_ms"].mean() == pytest.approx(true["e2e_ms"].mean(), rel=0.15)


def test_missing_information_is_requested_by_name(tmp_path: Path) -> None:
    _, path = served("vllm", tmp_path / "server")
    lines = path.read_text().splitlines()
    kept = [line for line in lines if "loggers.py" in line or "max_num_batched" in line]
    path.write_text("".join(f"{line}\n" for line in kept))
    diagnose_stages.read_stage([path], tmp_path / "out")
    with pytest.raises(InputError, match=r"number of requests cannot be determined.*--set engine"):
        diagnose_stages.rebuild_stage(tmp_path / "out", UserSettings())


def test_running_requests_agree_with_each_line_of_an_overload() -> None:
    """24 slots admit 2.8 requests/s, and 5/s arrive for 200 s. Some still wait in the last line."""
    at = np.arange(10.0, 350.0, 10.0)
    came = np.arange(0.1, 200.0, 0.2)
    waiting = np.searchsorted(came, at, "right") - np.floor(2.8 * at + 24)
    assert 0 < waiting[-1] < 30
    series = pd.DataFrame(
        {
            "t_s": at,
            "engine": 0,
            "running": 24,
            "waiting": waiting,
            "usage": 0.2,
            "prompt_rate": 2.8 * 900,
            "output_rate": 2.8 * 240,
            "hit_rate": 0.0,
            "preemptions": 0,
        }
    )
    arrivals = pd.DataFrame(
        {"t_s": came, "max_tokens": 0, "prompt_tokens": 0, "gave_up_s": np.nan, "request": np.nan}
    )
    member = sample_from_lines(series, KnownEngine(200_000.0, 16, 16_384), 0, arrivals)
    begun = member["t_s"] + member["queue_ms"] / 1e3
    ended = member["t_s"] + member["e2e_ms"] / 1e3
    running = np.array([((begun <= time) & (ended > time)).sum() for time in at])
    assert np.abs(running[1:-1] - 24).max() <= 1
    assert (member["tpot_ms"] / 1e3).mean() == pytest.approx(24 / (2.8 * 240), rel=0.05)
