"""Tests that a rejected prompt beyond a limit of the engine gets this limit as cause, with a
remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.outcome import Outcome
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.report import narrative
from simkv.report.console_summary import summarize_results
from simkv.report.run_explanation import explain_request
from simkv.report.whatif_tables import render_whatif, whatif_json
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.study.whatif.trial_evaluation import Evaluator
from simkv.study.whatif.whatif import WhatIfResult, run_whatif

TEXT = """\
name: long
workload: {requests: [
  {prompt_tokens: 20000, output_tokens: 10}, {prompt_tokens: 200, output_tokens: 10},
  {prompt_tokens: 30000, output_tokens: 10, max_tokens: 500}]}
engine: {name: vllm, num_gpu_blocks: 4000}
profile: unit-step
"""
REASON = "prompt 30,000 > max_model_len 8,192"


def scenario(folder: Path, *overrides: str) -> Scenario:
    (folder / "s.yaml").write_text(TEXT)
    return load(folder / "s.yaml", overrides)["run"]


def result(folder: Path, *overrides: str) -> RunResult:
    return run_scenario(scenario(folder, *overrides), folder, intervals=False)


def tried(folder: Path, *overrides: str) -> WhatIfResult:
    with Evaluator(folder) as evaluator:
        return run_whatif(
            scenario(folder, *overrides),
            evaluator,
            wanted=lambda change: change.field == "max_model_len",
        )


def test_console_page_and_explain_name_the_limit(tmp_path: Path) -> None:
    found = result(tmp_path)
    reasons = [life.reason for life in found.record.requests.values()]
    assert reasons == ["prompt 20,000 > max_model_len 8,192", "", REASON]
    assert summarize_results({"run": found})[2] == (
        f"Cause: 2 requests rejected: requests 0, 2; {REASON} (request 2)."
    )
    assert REASON in narrative.describe_cause(found)
    told = "\n".join(str(line) for line in explain_request("run", found, 0))
    assert "with 0 tokens: prompt 20,000 > max_model_len 8,192." in " ".join(told.split())


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("{name: vllm, num_gpu_blocks: 4000, max_model_len: 30000}", "prompt 30,000 = max_model"),
        ("{name: sglang, max_total_num_tokens: 20400}", "prompt 30,000 > 20,393, max_total_num_"),
        ("{name: trtllm, max_num_tokens: 20000}", "prompt 30,000 > max_num_tokens 20,000"),
        (
            "{name: trtllm, max_num_tokens: 40000, max_seq_len: 25000,"
            " max_tokens_in_paged_kv_cache: 64000}",
            "prompt 30,000 > max_seq_len 25,000",
        ),
        (
            "{name: trtllm, max_num_tokens: 40000, max_tokens_in_paged_kv_cache: 25600}",
            "prompt 30,000 > max_seq_len 25,600, which is max_tokens_in_paged_kv_cache",
        ),
    ],
)
def test_each_engine_names_its_own_limit(tmp_path: Path, engine: str, reason: str) -> None:
    lives = result(tmp_path, f"engine={engine}").record.requests
    assert lives[1].outcome is Outcome.FINISHED
    assert lives[2].outcome is Outcome.REJECTED
    assert lives[2].reason.startswith(reason)


def test_full_queue_is_the_cause_of_its_rejections(tmp_path: Path) -> None:
    lives = result(tmp_path, "engine.max_num_queued_reqs=0").record.requests
    assert lives[2].reason.startswith("max_num_queued_reqs: ")


def test_whatif_raises_the_limit_within_cache_and_model(tmp_path: Path) -> None:
    whole = tried(tmp_path)
    assert whole.cause == REASON
    assert whatif_json(whole)["cause"] == REASON
    assert f"Cause of the rejection: {REASON}" in list(map(str, render_whatif(whole)))
    assert whole.best
    assert (whole.best.judgement, whole.best.change.after) == ("fixes", 30500)
    small: Any = tried(tmp_path, "engine.num_gpu_blocks=1500").best
    assert (small.judgement, small.change.after) == ("helps", 23984)
    hardware = ("hardware={gpu: H100-SXM, model: llama-3-8b}", "engine.max_model_len=4096")
    bounded = tried(tmp_path, *hardware)
    assert max(effect.change.after for effect in bounded.effects) == 8192  # the limit of the model
    assert bounded.best is None
    assert tried(tmp_path, "engine.max_model_len=32000").cause is None
