"""Tests of requests that the log of a server counts, but that have no span."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.incident import diagnose_stages
from simkv.incident.emit.emitted_files import emit
from simkv.incident.evidence import Evidence
from simkv.incident.server_setup import UserSettings
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument

HERE = Path(__file__).parents[2] / "scenarios"


def overloaded(timeout: float | None) -> RunResult:
    """Return a run whose queue grows until clients give up."""
    lengths = {"distribution": "lognormal", "mean": 400, "sigma": 0.8, "max": 1500}
    arrivals = {"num_prompts": 500, "request_rate": 10.0, "seed": 3, "prompt_tokens": lengths}
    document = {
        "name": "overloaded",
        "workload": {"arrivals": arrivals | {"output_tokens": lengths | {"mean": 80}}},
        "engine": {"name": "vllm", "variant": "0.19.0", "max_model_len": 3000}
        | {"num_gpu_blocks": 190, "max_num_seqs": 32},
        "profile": "assumed-costs.json",
    } | ({} if timeout is None else {"timeout": timeout})
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "x.yaml", document)).values()))
    return run_scenario(scenario, HERE, intervals=False)


def read(result: RunResult, folder: Path, keep: int = 1) -> Evidence:
    """Return the evidence of a log and of every ``keep``-th span."""
    log, spans = emit(folder / "server", {"run": result}, ("vllm-log", "otel"))
    spans.write_text("\n".join(spans.read_text().splitlines()[::keep]) + "\n")
    return diagnose_stages.read_stage([log, spans], folder / "out")


def test_cancelled_requests_are_simulated(tmp_path: Path) -> None:
    result = overloaded(16.0)
    cancelled = result.summary["requests"] - result.summary["finished"]
    assert cancelled > 100
    found = read(result, tmp_path)
    assert found.arrivals is not None
    assert len(found.arrivals) == pytest.approx(cancelled, rel=0.2)
    assert found.arrivals["gave_up_s"].unique() == pytest.approx([16.0], rel=0.1)
    answer = diagnose_stages.explain_stage(tmp_path / "out", UserSettings(), try_flags=False)
    assert answer.explained, answer.text
    assert "got no answer" in answer.summary_lines[1]


def test_complete_spans_get_no_arrivals(tmp_path: Path) -> None:
    found = read(overloaded(None), tmp_path)
    assert found.arrivals is None
    assert not any("sampled" in one for one in found.lacks)


def test_sampled_spans_are_reported(tmp_path: Path) -> None:
    found = read(overloaded(None), tmp_path, keep=4)
    assert found.arrivals is None
    assert any("spans may be sampled" in one for one in found.lacks)
