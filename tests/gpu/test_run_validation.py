"""Tests that recorded runs are judged, and that L0 detects a rule that changed after the run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu.execution_record import GpuSetup, write_executions
from simkv.gpu.scenario_execution import ScenarioExecution
from simkv.validation.gpu_runs.timed_replay import read_runs
from tests.gpu.test_validate_gpu import MODELS, PROFILE, write_campaign
from tests.laws.pressure_scenarios import plain_scenario


def test_a_real_run_is_judged(tmp_path):
    """Other cost models are fitted to the campaign; without a campaign, the profile is compared
    only with the roofline.
    """
    setup = GpuSetup(MODEL_SHAPES["tiny"], graph_tokens=64)
    runs = {"run": ScenarioExecution(plain_scenario("vllm", "0.33.0"), setup).serve()}
    write_executions(tmp_path / "out", runs, setup)
    write_campaign(tmp_path / "campaign")
    (tmp_path / "p.json").write_text(PROFILE.model_dump_json(exclude_none=True))
    steps = {}
    for profile in ("campaign", "p.json"):
        arguments = ["gpu", "validate", str(tmp_path / "out"), "--profile", str(tmp_path / profile)]
        arguments += ["--repeat-run", str(tmp_path / "out"), "--out", str(tmp_path / "v.json")]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        assert "all the same" in result.output
        written = json.loads((tmp_path / "v.json").read_text())["run"]
        assert written["verdict"]["step"] is None
        steps[profile] = set(written["steps"])
    assert steps["campaign"] | {"random forest"} == MODELS  # the forest needs scikit-learn
    assert steps["p.json"] == {"profile", "roofline"}
    recorded = read_runs(tmp_path / "out")["run"]
    assert recorded.record.steps == runs["run"].record.steps  # so the metrics are equal, too
    assert len(recorded.steps) == len(recorded.record.steps)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "mistralrs", "fastdeploy"])
def test_l0_detects_another_scheduler(engine, tmp_path, monkeypatch):
    """The replay permits half as many running sequences as the run."""
    variant = {
        "vllm": "0.33.0", "sglang": "0.5.23", "mistralrs": "pr2034", "fastdeploy": "ratio",
    }[engine]  # fmt: skip
    setup = GpuSetup(MODEL_SHAPES["tiny"], graph_tokens=64)
    run = ScenarioExecution(plain_scenario(engine, variant), setup).serve()
    knob = "max_running_requests" if engine == "sglang" else "max_num_seqs"
    changed = replace(run.scenario.engine, **{knob: 2})
    other = replace(run, scenario=run.scenario.model_copy(update={"engine": changed}))
    write_executions(tmp_path / "out", {"run": other}, setup)
    verdict = read_runs(tmp_path / "out")["run"].verdict
    assert verdict.step is not None
    assert verdict.recorded != verdict.replayed
