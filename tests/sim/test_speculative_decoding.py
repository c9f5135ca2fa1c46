"""Tests of speculative decoding: acceptance, delivered tokens, costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from simkv.core.draft_acceptance import DraftAcceptance
from simkv.core.scheduler_protocol import Batch, DraftedTokens
from simkv.costs.cost_profile import CostTerm, load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.costs.step_load import StepLoad, compute_step_load
from simkv.metrics.run_metrics import token_rows, tpot
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.serve.recorded_workload import recorded_scenario
from simkv.workload.trace_reader import read_trace
from simkv.workload.workload_section import Workload, generate_requests


def result(acceptance: Any, drafts: int = 4, outputs: int = 21, **engine: Any) -> RunResult:
    """Run one request with drafts; steps take a second, drafting 0.05 s per pass."""
    tree = {
        "name": "t",
        "workload": {
            "acceptance": acceptance,
            "requests": [{"prompt_tokens": 16, "output_tokens": outputs}],
        },
        "engine": {"name": "vllm", "num_speculative_tokens": drafts} | engine,
        "profile": "unit-step",
        "drafter": {"share": 0.05},
    }
    return run_scenario(Scenario.model_validate(tree), Path())


@pytest.mark.parametrize("rates", [0.7, (0.8, 0.5, 0.2)])
def test_acceptance_matches_rates(rates: Any) -> None:
    draws = [DraftAcceptance(rates, 7).accepted(place, 4) for place in range(4000)]
    shares = [sum(count > k for count in draws) / 4000 for k in range(4)]
    told = [0.7 ** (k + 1) for k in range(4)] if rates == 0.7 else [0.8, 0.5, 0.2, 0.0]
    assert shares == pytest.approx(told, abs=0.03)
    assert draws == [DraftAcceptance(rates, 7).accepted(place, 4) for place in range(4000)]
    assert draws != [DraftAcceptance(rates, 8).accepted(place, 4) for place in range(4000)]
    fewer = [DraftAcceptance(rates, 7).accepted(place, 2) for place in range(4000)]
    assert fewer == [min(count, 2) for count in draws]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_acceptance_emits_drafts_plus_one(
    asynchronous: bool,
) -> None:
    found = result(1.0, async_scheduling=asynchronous)
    (life,) = found.record.requests.values()
    assert life.tokens == 21
    assert sum(last - first + 1 for first, last in token_rows(life)) == 1 + 4
    assert found.summary["spec_decode"] == {
        "acceptance_rate": 100.0,
        "acceptance_length": 5.0,
        "num_drafts": 4,
        "draft_tokens": 16,
        "accepted_tokens": 16,
    }
    assert found.summary["itl_ms"]["mean"] == pytest.approx(1200.0)
    assert tpot(life) == pytest.approx(4 * 1.2 / 20)


def test_zero_acceptance_emits_one_token_per_step() -> None:
    none, plain = result(None), result(None, drafts=0)
    assert none.summary["spec_decode"]["accepted_tokens"] == 0
    assert "spec_decode" not in plain.summary
    steps = [len(found.record.steps) for found in (none, plain)]
    assert steps[0] - steps[1] in (
        0,
        1,
    )  # one step may be in flight when the last token arrives
    assert none.summary["tpot_ms"]["mean"] == pytest.approx(1200.0)
    assert plain.summary["tpot_ms"]["mean"] == pytest.approx(1000.0)
    ngrams = result(None, speculative_method="ngram")
    assert ngrams.summary["tpot_ms"]["mean"] == pytest.approx(1000.0)


def test_rejected_drafts_are_not_recomputed_tokens() -> None:
    assert result(0.5, outputs=60).summary["recomputed_tokens"] == 0


def test_draft_costs_one_decode_without_context() -> None:
    batch = Batch([(0, 4)], [100], [0], "decode", drafted=DraftedTokens(3, {0: 3}))
    load = compute_step_load(batch)
    assert (load.decode_seqs, load.decode_context, load.draft_tokens) == (1, 100, 3)
    profile = load_profile("l4-mistralrs-pr2034")
    executor = SimulatedExecutor(profile, drafting=0.1)
    four = load._replace(decode_seqs=4, emits=4, draft_tokens=0, draft_passes=0)
    one = load._replace(draft_tokens=0, draft_passes=0)
    told = executor.run(four) + 3 * 0.1 * executor.run(one)
    assert executor.run(load) == pytest.approx(told)


def test_mtp_pass_takes_one_layer_and_the_whole_output_head() -> None:
    profile = load_profile("unit-step").model_copy(
        update={
            "terms": [
                CostTerm(name="layers", feature="tokens", seconds=10.0),
                CostTerm(name="head", feature="emits", seconds=1.0),
            ]
        }
    )
    executor = SimulatedExecutor(profile, drafting=0.5, layers=5)
    load = StepLoad(0, 0, 0, 2, 100, 0, 2, draft_tokens=6, draft_passes=3)
    verified = 8 * 10 + 8 * 1
    first, others = 8 * 10 / 5 + 2 * 1, 2 * (2 * 10 / 5 + 2 * 1)
    assert executor.run(load) == pytest.approx(verified + first + others)


def test_mtp_takes_its_time_and_memory_from_the_model(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(
        """\
name: t
workload: {burst: {num_prompts: 4, prompt_tokens: 100, output_tokens: 50}, acceptance: 0.8}
engine: {name: vllm, variant: 0.20.0, num_speculative_tokens: 2}
hardware: {gpu: H200-SXM, model: deepseek-ai/DeepSeek-V3, tp: 8}
front_end: none
variants:
  eagle: {drafter: {share: 0}}
  mtp: {engine: {speculative_method: mtp}}
  mtp-share: {engine: {speculative_method: mtp}, drafter: {share: 0}}
"""
    )
    variants = load(file)
    tpots = {
        name: run_scenario(scenario, tmp_path).summary["tpot_ms"]["mean"]
        for name, scenario in variants.items()
    }
    # Two passes through one of 61 layers, each with the output head.
    assert 1 + 2 / 61 < tpots["mtp"] / tpots["eagle"] < 1.06
    assert tpots["mtp-share"] == tpots["eagle"]
    blocks = {name: scenario.engine.num_gpu_blocks for name, scenario in variants.items()}
    assert blocks["mtp"] == blocks["mtp-share"] < 0.97 * blocks["eagle"]


def test_drafts_count_in_step_tokens_of_prompt() -> None:
    batch = Batch(
        [(0, 4), (1, 3)], [20, 9], [0, 1], "mixed", drafted=DraftedTokens(2, {0: 2, 1: 2})
    )
    load = compute_step_load(batch)
    assert (load.prefill_seqs, load.prefill_tokens) == (1, 4)
    assert (load.decode_seqs, load.draft_tokens) == (1, 2)


def test_traces_and_lists_set_acceptance(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,acceptance\n0,5,2,0.25\n1,5,2,\n")
    assert read_trace(path).rows.column("acceptance").tolist()[0] == 0.25
    requests = generate_requests(Workload(trace=str(path), acceptance=[0.5]), None)
    assert [r.acceptance.rates for r in requests if r.acceptance] == [0.25, (0.5,)]
    listed = [{"prompt_tokens": 5, "output_tokens": 2, "acceptance": 0.1}]
    (one,) = generate_requests(
        Workload.model_validate({"requests": listed, "acceptance": 0.9}), None
    )
    assert one.acceptance == DraftAcceptance(0.1, 0)
    (bad := path).write_text("arrival,prompt_tokens,output_tokens,acceptance\n0,5,2,1.5\n")
    with pytest.raises(Exception, match=r"t\.csv:2: acceptance: should be a number from 0 to 1"):
        read_trace(bad)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ([0.5, 0.6], "must not increase"),
        ([0.5, "x"], "valid number"),
        ([], "at least 1 item"),
        (1.5, "less than or equal to 1"),
    ],
)
def test_reports_invalid_rates_once(rates: Any, words: str) -> None:
    burst = {"num_prompts": 1, "prompt_tokens": 1, "output_tokens": 1}
    with pytest.raises(ValidationError, match=words) as raised:
        Workload.model_validate({"burst": burst, "acceptance": rates})
    assert raised.value.error_count() == 1


def test_recorded_requests_repeat_acceptance() -> None:
    first = result(0.6, outputs=40)
    requests = [life.request for life in first.record.requests.values()]
    again = run_scenario(recorded_scenario(first.scenario, requests), Path())
    assert again.summary["spec_decode"] == first.summary["spec_decode"]
    assert again.record.end == first.record.end
