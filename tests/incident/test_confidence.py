"""Tests of the words for an answer's confidence: sources of values, differences and the
ensemble.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pandas as pd
import pytest

from simkv.incident.evidence import INFERRED, Evidence
from simkv.incident.incident_answer import _describe_measured, describe_ensemble, describe_inferred
from simkv.incident.log_summary import summarize_log
from simkv.incident.observed_comparison import FigureMatch, _preemptions
from simkv.incident.server_setup import ServerSetup
from simkv.incident.workload_rebuild import is_counted
from simkv.sim.run_record import RunRecord


@pytest.mark.parametrize(
    ("observed", "simulated", "difference"),
    [(2.0, 2.5, "+25.0 %"), (1e-9, 0.02, "+0.02"), (0.0, 0.3, "+0.3")],
)
def test_difference_of_values_near_zero_is_absolute(
    observed: float, simulated: float, difference: str
) -> None:
    assert FigureMatch("E2E mean (s)", observed, simulated, True).difference == difference


def test_sampled_figure_is_not_called_measured() -> None:
    assert FigureMatch("E2E mean (s)", 1.0, 1.0, True, "15 %", True).kind == "reconstructed"
    assert FigureMatch("E2E mean (s)", 1.0, 1.0, True, "15 %").kind == "measured"


@pytest.mark.parametrize(("high", "word"), [(2.2, "is identifiable"), (5.0, "not identifiable")])
def test_spread_of_the_reconstructions_decides_whether_it_is_identifiable(
    high: float, word: str
) -> None:
    assert word in describe_ensemble(pd.DataFrame({"e2e": [2.0, high]}))


def test_estimated_number_of_requests_widens_the_interval() -> None:
    ensemble = pd.DataFrame({"e2e": [100.0, 100.2, 99.8], "e2e_observed": 100.0})

    def ends(counted: bool) -> list[float]:
        found = re.search(r"mean E2E is (\S+) to (\S+) s", describe_ensemble(ensemble, counted))
        assert found
        return [float(one) for one in found.groups()]

    assert ends(True) == pytest.approx([99.62, 100.38], abs=0.03)
    assert ends(False) == pytest.approx([85.0, 115.0], abs=0.1)
    assert "number of requests is estimated" in describe_ensemble(ensemble, False)


def test_inferred_setting_is_not_called_stated() -> None:
    setup = ServerSetup(
        {"name": "vllm", "max_num_seqs": 4, "block_size": 16},
        None,
        None,
        1,
        {"max_num_seqs": INFERRED, "block_size": "server.log:3"},
        (),
    )
    assert describe_inferred(setup) == (
        " Inferred from the log lines, because the log does not state them: max_num_seqs=4."
    )
    assert describe_inferred(replace(setup, sources={})) == ""


@pytest.mark.parametrize(("preempted", "inferred"), [(0, True), (3, False)])
def test_slots_are_not_inferred_if_requests_are_preempted(preempted: int, inferred: bool) -> None:
    series = lines([0.0] * 4, [4, 4, 4, 4]).assign(waiting=9, preemptions=[0, preempted, 0, 0])
    summary = summarize_log(Evidence("server.log", engine="vllm", series=series))
    assert summary is not None
    assert any(one.inferred for one in summary.findings) == inferred


def test_measured_preemptions_are_beside_the_simulated_ones() -> None:
    series = lines([0.0] * 4, [4, 4, 4, 4]).assign(preemptions=[0, 5, 2, 0])
    requests = {0: SimpleNamespace(preempted_at=[1.0, 2.0]), 1: SimpleNamespace(preempted_at=[])}
    (figure,) = _preemptions([cast("RunRecord", SimpleNamespace(requests=requests))], series)
    assert (figure.observed, figure.simulated) == (7.0, 2.0)
    assert not figure.agrees
    assert not figure.decides
    assert _preemptions([], series.assign(preemptions=0)) == []
    summary = summarize_log(Evidence("server.log", engine="vllm", series=series))
    assert _describe_measured(summary) == " Measured: 7 preemptions (14 per minute)."


def lines(hit_rates: list[float], running: list[int]) -> pd.DataFrame:
    rows = len(running)
    return pd.DataFrame(
        {
            "t_s": [10.0 * i for i in range(rows)],
            "engine": 0,
            "running": running,
            "waiting": 0,
            "usage": 0.5,
            "prompt_rate": 100.0,
            "output_rate": 100.0,
            "hit_rate": hit_rates,
            "preemptions": 0,
        }
    )


def test_falling_hit_rate_is_a_finding() -> None:
    series = lines([0.88, 0.8, 0.7, 0.6, 0.5, 0.4], [4, 8, 16, 32, 64, 128])
    summary = summarize_log(Evidence("server.log", series=series))
    assert summary is not None
    assert [one.name for one in summary.problems] == ["hit rate falls"]
    assert "fell from 88 to 40 %" in summary.problems[0].text
    assert "evicted" in summary.problems[0].text


def test_ttft_far_above_prefill_with_an_empty_queue_is_front_end_bound() -> None:
    requests = pd.DataFrame({"ttft_ms": [200.0] * 3, "queue_ms": [1.0] * 3, "prefill_ms": 60.0})
    evidence = Evidence("server.log", series=lines([0.0] * 4, [2] * 4), requests=requests)
    summary = summarize_log(evidence)
    assert summary is not None
    assert [one.name for one in summary.problems] == ["front-end bound"]


def test_admission_limit_needs_free_cache() -> None:
    series = lines([0.0] * 4, [32] * 4).assign(waiting=9)
    names = [
        [one.name for one in found.problems]
        for usage in (0.5, 0.97)
        if (found := summarize_log(Evidence("s", series=series.assign(usage=usage))))
    ]
    assert names == [["admission limit"], ["KV cache full"]]


def test_number_of_requests_is_estimated_if_no_input_states_it() -> None:
    lines = pd.DataFrame({"t_s": [0.0], "prompts": [float("nan")]})
    evidence = Evidence("server.log", series=lines)
    assert not is_counted(evidence)
    assert is_counted(replace(evidence, access=pd.DataFrame({"t_s": [0.0]})))
    assert is_counted(replace(evidence, series=lines.assign(prompts=[3.0])))
