"""Tests that a saved scenario file reproduces the same runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file
from simkv.report.run_files import write_run
from simkv.scenario.packaged_scenarios import list_packaged_scenarios
from simkv.scenario.scenario_loader import load, resolve_variants
from simkv.scenario.scenario_writer import to_yaml
from simkv.scenario.yaml_document import read_document

BASE = """\
name: t
workload: {arrivals: {num_prompts: 12, request_rate: 4.0, prompt_tokens: 20, output_tokens: 9}}
engine: {name: vllm, block_size: 4, num_gpu_blocks: 24, startup_check: false}
profile: unit-step
"""
PIPELINE = BASE.replace(
    "name: vllm, block_size: 4, num_gpu_blocks: 24, startup_check: false",
    "name: fastdeploy, block_size: 4, num_blocks: 24",
)
ROUTERS = """\
fleet:
  replicas: [{role: prefill}, {role: decode, count: 2}]
  kv_transfer: {bytes_per_token: 1, bandwidth: 1000.0}
  decode_router: {name: power_of_two, seed: 3, kv_weight: 1.0}
variants: {a: {}, b: {fleet: {decode_router: {name: random, seed: 1}}}}
"""
SECTIONS = {
    "step_scale": BASE + "step_scale: {decode: 3.0, prefill: 0.5}\n",
    "timeout": BASE + "timeout: 30.0\n",
    "horizon": BASE + "horizon: 6.5\n",
    "engine_ready": BASE + "engine_ready: 2.5\n",
    "pipeline": PIPELINE + "pipeline: {put_gap: 0.2, step_gap: 0.1, max_prefill_num: null}\n",
    "fleet": BASE + "fleet: {replicas: 3, router: {name: power_of_two, seed: 4}, cold_start: 2}\n",
    "roles": BASE + ROUTERS,
    "one variant has it": BASE
    + "variants:\n  a: {step_scale: {mixed: 2.0}}\n  b: {fleet: {replicas: 2}, horizon: 9.0}\n"
    + "  c: {workload: {burst: {num_prompts: 3, prompt_tokens: 4, output_tokens: 2}}}\n",
}


def saved(folder: Path, results: dict[str, RunResult]) -> Path:
    write_run(folder, results, [], lambda target: None, steps=True, ledger=True)
    return folder


@pytest.mark.parametrize("name", SECTIONS)
def test_run_of_the_saved_scenario_writes_the_same_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "s.yaml").write_text(SECTIONS[name])
    first = saved(tmp_path / "first", run_file(tmp_path / "s.yaml"))
    again = saved(tmp_path / "again", run_file(first / "scenario.yaml"))
    assert [file.name for file in again.iterdir()] == [file.name for file in first.iterdir()]
    for file in first.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", list_packaged_scenarios())
def test_packaged_scenarios_round_trip_through_their_saved_file(tmp_path: Path, name: str) -> None:
    path = list_packaged_scenarios()[name]
    whole: dict[str, Any] = load(path)
    for profile in path.parent.glob("*.json"):
        (tmp_path / profile.name).write_bytes(profile.read_bytes())
    (tmp_path / "scenario.yaml").write_text(to_yaml(whole), encoding="utf-8")
    assert resolve_variants(read_document(tmp_path / "scenario.yaml")) == whole


def test_fields_of_one_variant_stay_in_that_variant(tmp_path: Path) -> None:
    text = (
        "variants: {a: {summary: x}, b: {report: 'http://x.y', expect: {b: {verdict: served}}}}\n"
    )
    (tmp_path / "s.yaml").write_text(BASE + text)
    whole = load(tmp_path / "s.yaml")
    (tmp_path / "again.yaml").write_text(to_yaml(whole))
    assert load(tmp_path / "again.yaml") == whole
