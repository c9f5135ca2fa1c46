"""Tests of data-parallel ranks behind one endpoint: separated in a log and rebuilt as a fleet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simkv.costs.cost_profile import CostProfile, FitQuality
from simkv.costs.hardware.model_gpu_catalog import known_model
from simkv.costs.sources.single_request import compute_model_traits
from simkv.incident import diagnose_stages
from simkv.incident.emit.emitted_files import emit
from simkv.incident.emit.otel_writer import spans
from simkv.incident.evidence import sum_over_ranks
from simkv.incident.incident_simulation import (
    rank_records,
    request_times,
    sample_state,
)
from simkv.incident.server_setup import UserSettings, infer_setup
from simkv.incident.source_reader import read_source
from simkv.incident.stats_line_workload import KnownEngine, sample_from_lines
from simkv.incident.step_costs import UnitCosts, cost_terms
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import load, resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.sim.simulation import simulate_with_profile

ENGINE = {"name": "vllm", "variant": "0.24.0", "num_gpu_blocks": 300, "max_model_len": 4096}


MODEL = "qwen3-30b-a3b"


def costs(folder: Path, *, lockstep: bool) -> str:
    """Write a profile and return its path; with ``lockstep``, the model is a mixture of experts."""
    prices = UnitCosts(0.01, 0.002, 1e-5, 2e-5, 1e-9, 2e-8, 3.0)
    model = known_model(MODEL)
    assert model is not None
    terms = cost_terms(prices, compute_model_traits(model, 8192) if lockstep else None)
    profile = CostProfile(
        name="costs",
        engine="vllm",
        model="m",
        gpu="g",
        basis="assumed",
        terms=terms,
        idle_pass_s=1e-4,
        range={},
        fit=FitQuality(points=0),
        source=[],
    )
    (folder / "costs.json").write_text(profile.model_dump_json(exclude_none=True))
    return "costs.json"


def served(folder: Path, *, lockstep: bool) -> RunResult:
    """Return a run of two ranks behind vLLM's load balancer."""
    document = {
        "name": "ranks",
        "workload": {
            "arrivals": {
                "num_prompts": 80,
                "request_rate": 4.0,
                "prompt_tokens": {"distribution": "uniform", "low": 100, "high": 1500},
                "output_tokens": {"distribution": "uniform", "low": 20, "high": 200},
                "seed": 2,
            }
        },
        "engine": ENGINE,
        "fleet": {
            "replicas": 2,
            "router": "least_loaded",
            "refresh_interval": 0.1,
            "lockstep": lockstep,
        },
        "profile": costs(folder, lockstep=lockstep),
    }
    scenario = next(iter(resolve_variants(YamlDocument(folder / "ranks.yaml", document)).values()))
    return run_scenario(scenario, folder, intervals=False)


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "lockstep"])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return served(tmp_path_factory.mktemp("ranks"), lockstep=request.param)


def log_of(result: RunResult, folder: Path) -> Path:
    """Write the log of all ranks as one server writes it, with iterations by the ranks' processes;
    return its path.
    """
    return emit(folder, {"run": result}, ("vllm-log", "vllm-log-iterations"))[0]


def test_lines_of_ranks_are_separated(result: RunResult, tmp_path: Path) -> None:
    found = read_source(log_of(result, tmp_path))
    assert found.series is not None
    assert found.steps is not None
    setup = infer_setup(found, UserSettings())
    assert setup.ranks == 2
    assert setup.engine["num_gpu_blocks"] == 300  # of each rank
    for rank, record in enumerate(result.parts.values()):
        steps = found.steps[found.steps["engine"] == rank]
        assert len(steps) == len(record.steps)
        assert steps["prefill_tokens"].sum() == sum(record.steps.prefill_tokens)
        lines = found.series[found.series["engine"] == rank]
        prompts = sum(life.request.prompt_tokens for life in record.requests.values())
        assert 10 * lines["prompt_rate"].sum() == pytest.approx(prompts, rel=0.01)
    drawn = sample_from_lines(found.series, KnownEngine(4800.0, 16, 4096), 0)
    for rank, record in enumerate(result.parts.values()):
        prompts = sum(life.request.prompt_tokens for life in record.requests.values())
        mine = drawn[drawn["engine"] == rank]
        assert mine["prompt_tokens"].sum() == pytest.approx(prompts, rel=0.01)


def test_ranks_are_rebuilt_as_a_fleet(result: RunResult, tmp_path: Path) -> None:
    lockstep = result.fleet is not None and result.fleet.rules.lockstep
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(f"{line}\n" for line in spans(result.record)))
    asked = UserSettings(
        "vllm",
        "0.24.0",
        model=MODEL if lockstep else None,
        dp=2,
        overrides={"num_gpu_blocks": 300, "max_model_len": 4096},
    )
    diagnose_stages.read_stage([path], tmp_path / "out")
    profile = diagnose_stages.calibrate_stage(tmp_path / "out", asked)
    scenario = next(iter(load(tmp_path / "out" / "scenario.yaml", []).values()))
    assert scenario.fleet is not None
    assert (scenario.fleet.size, scenario.fleet.lockstep) == (2, lockstep)
    run = simulate_with_profile(scenario, profile)
    assert len(rank_records(run)) == 2
    made, true = request_times(run.record, profile.front_s), request_times(result.record)
    assert made["e2e_ms"].mean() == pytest.approx(true["e2e_ms"].mean(), rel=0.03)


def test_requests_in_the_system_are_summed_over_ranks(result: RunResult) -> None:
    parts = list(result.parts.values())
    at = np.array([2.0, 8.0])
    both = sample_state(parts, at)
    assert both["running"].tolist() == [
        sum(sample_state([part], at)["running"].iloc[place] for part in parts) for place in (0, 1)
    ]
    lines = pd.DataFrame(
        {
            "t_s": [0.0, 1.0, 10.0],
            "engine": [0, 1, 0],
            "running": [3, 4, 5],
            "waiting": [0, 1, 2],
            "usage": [0.5, 0.1, 0.7],
        }
    )
    summed = sum_over_ranks(lines)
    assert summed["running"].tolist() == [3, 7, 9]
    assert summed["usage"].iloc[-1] == pytest.approx(0.4)


def test_ranks_are_scraped_as_engines(result: RunResult, tmp_path: Path) -> None:
    (path,) = emit(tmp_path, {"run": result}, ("prometheus",))
    metrics = json.loads(path.read_text())["data"]["result"]
    ended: dict[str, float] = {}
    for one in metrics:
        if one["metric"]["__name__"] == "vllm:e2e_request_latency_seconds_count":
            ended[one["metric"]["engine"]] = float(one["values"][-1][1])
    own = [len(record.requests) for record in result.parts.values()]
    assert ended == {"0": own[0], "1": own[1]}
    found = read_source(path)
    assert sum(found.histograms["e2e"]["count"]) == sum(own)
