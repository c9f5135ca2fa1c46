"""Tests of the default output of a run: five lines and one table."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from simkv.core.figure_registry import is_lower_bound
from simkv.metrics.expectation_checks import check_expectations
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file
from simkv.report import narrative
from simkv.report.adaptive_table import AdaptiveTable, Column, StackedTable
from simkv.report.console_summary import explain_faster_recompute, render_brief, summarize_results
from simkv.report.page_text import list_affected
from simkv.report.published_figures import compare_published
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def forty() -> dict[str, RunResult]:
    return run_file(ROOT / "scenarios/mistralrs-forty.yaml")


def printed(results: dict[str, RunResult], width: int) -> str:
    out = io.StringIO()
    on = Console(file=out, width=width, highlight=False)
    on.print(
        *render_brief(results, compare_published(results), check_expectations(results)), sep="\n"
    )
    return out.getvalue()


def test_the_answer_is_five_lines(forty: dict[str, RunResult]) -> None:
    result, affected, cause, fix, confidence = summarize_results(forty)
    assert result == "Result: mistralrs-forty, before-assumed: 16 of 40 finished, 24 starved."
    assert affected == "Affected: requests 16 to 39 (starved; clients gave up after 300 s)."
    assert cause.startswith(
        "Cause: only one bucket of requests (of one length or modality) runs at a time, KV cache "
        "only 14 % used. 3,536 preemptions because sequences of another length were running; "
    )
    assert "Time of request 32: 99 % behind the head of the queue, 1 %" in cause
    assert fix == (
        "Fix: variant after-assumed serves all requests (engine.variant: bucketed → pr2034)."
    )
    assert confidence.startswith(
        "Confidence: step times of l4-mistralrs-slow-prefill assumed, error unknown; "
    )


@pytest.mark.parametrize("width", [50, 80, 180])
def test_variant_names_are_complete_and_lines_fit(forty: dict[str, RunResult], width: int) -> None:
    text = printed(forty, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for name in forty:
        (row,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert ("tok/s" in row) == (width >= 80)
        assert (" of 40" in row) == (width >= 180)
    headings = " ".join(" ".join(lines[: lines.index(row)]).split())
    for figure in ("median", "P99", "TPOT", "throughput") if width >= 80 else ():
        assert figure in headings
    assert ("Omitted columns:" in text) == (width < 180)


def test_latencies_include_all_requests(forty: dict[str, RunResult]) -> None:
    """8 of the 24 starved requests had no token when their client left after 300 s."""
    record, figures = forty["before-assumed"].record, forty["before-assumed"].summary
    mean = figures["ttft_all_ms"]["mean"] / 1000
    got = figures["ttft_ms"]["mean"] / 1000
    none = [life for life in record.requests.values() if life.first_token is None]
    others = [life for life in record.requests.values() if life.first_token is not None]
    assert is_lower_bound(figures, "ttft_all_ms.mean")
    assert figures["ttft_all_ms"]["censored"] == len(none) == 8
    assert mean == pytest.approx(
        (sum(life.first_token - life.request.arrival for life in others) + 300 * len(none)) / 40  # type: ignore[operator]
    )
    assert mean > 100 * got
    assert figures["ttft_all_ms"]["p99"] == pytest.approx(300_000.0)
    served = forty["after"].summary
    assert served["e2e_all_ms"]["p99"] == pytest.approx(served["e2e_ms"]["p99"])
    assert served["e2e_all_ms"]["at_least"] == []


def test_explains_why_the_fix_finishes_later(forty: dict[str, RunResult]) -> None:
    (line,) = explain_faster_recompute(forty)
    assert line.startswith(
        "before-fitted finishes earlier (110 s) than after (196 s) because of its step times"
    )
    assert "steps contain 3.6 requests and take 98.6 ms, steps of after contain 12.6" in line
    assert not list(explain_faster_recompute({"after": forty["after"]}))


def test_failed_expectations_are_listed(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "name: t\nworkload: {requests: [{prompt_tokens: 4, output_tokens: 3}]}\n"
        "engine: {name: mistralrs, variant: pr2034}\nprofile: unit-step\n"
        "expect: {run: {makespan_s: 5, finished: 1}}\n"
    )
    text = printed(run_file(tmp_path / "s.yaml"), 80)
    assert "t: 1 of 1 finished." in text
    assert "Expectations: 1 of 2 hold; failed:" in text
    assert "run: makespan_s = 5: found 3" in text
    assert "Fix:" not in text


def shown(table: object, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def test_low_ranked_columns_are_omitted_first_and_named() -> None:
    columns = [
        Column("name", ["a-long-name"], right=False),
        Column("cheap", ["1"], 1),
        Column("large", ["2"], 2),
    ]
    assert shown(AdaptiveTable(columns), 60)[-1].split() == ["a-long-name", "1", "2"]
    head, _, row, gone = shown(AdaptiveTable(columns), 24)
    assert (head.split(), row.split()) == (["name", "cheap"], ["a-long-name", "1"])
    assert gone == "Omitted columns: large"
    assert shown(AdaptiveTable(columns), 8)[2:4] == ["  a-lo", "  ng-n"]


def test_required_columns_continue_in_further_tables() -> None:
    table = StackedTable(
        Column("", ["x"], right=False), [Column(n, ["1"]) for n in ("aaaa", "bbbb")]
    )
    assert len(shown(table, 60)) == 3
    assert [line.split() for line in shown(table, 16)][0::3] == [["aaaa"], ["bbbb"]]


GIVING_UP = """
name: giving-up
profile: p.json
timeout: 1.0
workload: {burst: {num_prompts: 10, interval: 0.02, prompt_tokens: 40, output_tokens: 20}}
engine: {name: vllm, num_gpu_blocks: 12, max_model_len: 100, max_num_seqs: 8}
variants:
  small: {}
  larger: {engine: {num_gpu_blocks: 14}}
  smaller: {engine: {num_gpu_blocks: 9}}
  patient: {timeout: 30}
"""


def test_uncertain_counts_are_reported_as_ranges(tmp_path: Path) -> None:
    from tests.metrics.test_fidelity import PROFILE, error

    fit = {"points": 9, "held_out": {"all": error(0.4)}}
    (tmp_path / "p.json").write_text(json.dumps({**PROFILE, "basis": "assumed", "fit": fit}))
    (tmp_path / "s.yaml").write_text(GIVING_UP)
    found = run_file(tmp_path / "s.yaml")
    assert summarize_results(found)[0] == (
        "Result: giving-up, small: 7 of 10 finished, 3 starved; 0 to 7 of 10 requests might "
        "starve, given the error of the step times."
    )
    assert list_affected(found["small"])[-1] == (
        "0 to 7 of 10 requests might starve, given the error of the step times."
    )
    assert narrative.might(found["patient"]) == ""
    text = printed(found, 160)
    assert "Fix: variant larger reduces mean TTFT from" in text
    assert "but 0 to 7 of 10 requests might starve" in text
    assert "smaller: 0 to 7 of 10 requests might starve, given the error of the step times." in text


def test_fix_excludes_variants_with_other_hardware_or_workload(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "name: t\nworkload: {burst: {num_prompts: 4, prompt_tokens: 40, output_tokens: 20}}\n"
        "engine: {name: vllm, num_gpu_blocks: 5, max_model_len: 64}\nprofile: unit-step\n"
        "timeout: 30\nvariants:\n  strict: {}\n  patient: {timeout: 900}\n"
    )
    found = run_file(tmp_path / "s.yaml")
    fix = "Fix: no variant fixes this on the same workload and hardware; try `simkv whatif`."
    assert fix in summarize_results(found)
    alone = summarize_results({"strict": found["strict"]})
    assert "Fix: no variant fixes this; try `simkv whatif`." in alone


def test_names_the_overload_as_the_fix_of_a_served_run(tmp_path: Path) -> None:
    def answer(interval: float) -> str:
        text = (
            "name: t\n"
            f"workload: {{burst: {{num_prompts: 200, prompt_tokens: 30, output_tokens: 20, "
            f"interval: {interval}}}}}\n"
            "engine: {name: vllm, block_size: 4, num_gpu_blocks: 320, max_num_seqs: 4, "
            "startup_check: false}\n"
            "profile: unit-step\n"
        )
        (tmp_path / "s.yaml").write_text(text)
        return "\n".join(summarize_results(run_file(tmp_path / "s.yaml")))

    # Four slots, and 21 steps of 1 s between two requests of a slot: 4/21 requests/s.
    pattern = r"Fix: the load exceeds what the server sustains: (\S+) requests/s arrive, (\S+)/s"
    text = answer(2.0)
    found = re.search(pattern, text)
    assert found
    assert float(found[1]) == pytest.approx(0.5, rel=0.02)
    assert float(found[2]) == pytest.approx(4 / 21, rel=0.03)
    assert "; use a larger max_num_seqs, more replicas or a lower rate" in text
    # The rate does not depend on how much of the work is done while requests still arrive.
    found = re.search(pattern, answer(0.3))
    assert found
    assert float(found[2]) == pytest.approx(4 / 21, rel=0.03)
    calm = answer(8.0)
    assert "exceeds" not in calm
    assert "Cause: none; requests hardly waited" in calm


def test_names_a_variant_with_other_weights(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "name: t\n"
        "workload: {arrivals: {num_prompts: 60, request_rate: 8, prompt_tokens: 2000, "
        "output_tokens: 200, seed: 1}}\n"
        "hardware: {gpu: L4, model: llama-3.1-8b}\n"
        "engine: {name: vllm, max_model_len: 8192}\n"
        "timeout: 60\n"
        "variants:\n  plain: {}\n  fp8: {hardware: {weights: fp8, kv: fp8}}\n"
    )
    said = "\n".join(summarize_results(run_file(tmp_path / "s.yaml")))
    assert "no variant fixes this on the same workload and hardware; with other" in said
    assert "hardware.weights: none → fp8" in said
