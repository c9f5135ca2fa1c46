"""Tests of sessions with growing prompts, rebuilt from statistics lines and access lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simkv.incident.access_arrivals import arrivals_from_access
from simkv.incident.bounded_table import AccessCounts
from simkv.incident.diagnose_stages import read_stage, rebuild_stage
from simkv.incident.emit.emitted_files import emit
from simkv.incident.evidence import Evidence, UndeterminedError
from simkv.incident.incident_calibration import choose_fitted_rows
from simkv.incident.log_windows import LogWindows, with_initial_state
from simkv.incident.server_setup import UserSettings
from simkv.incident.session_rebuild import (
    PromptTokens,
    assign_sessions,
    lost_hit_share,
    tokens_in_cache,
)
from simkv.incident.source_join import join
from simkv.incident.source_reader import read_source
from simkv.incident.stats_line_departures import departure_times
from simkv.incident.stats_line_workload import KnownEngine, _check_sessions, _warm_up
from simkv.incident.workload_rebuild import RebuiltWorkload, _hit_share
from simkv.incident.worst_part import MAX_PART_LINES, select_worst_part
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument

HERE = Path(__file__).parents[2] / "scenarios"
SESSIONS = {
    "num_sessions": 40,
    "turns": {"distribution": "uniform", "low": 6, "high": 20},
    "prompt_tokens": {"distribution": "lognormal", "mean": 700, "sigma": 0.6, "max": 3000},
    "output_tokens": {"distribution": "lognormal", "mean": 200, "sigma": 0.5, "max": 800},
    "request_rate": 1.0,
    "think_time": 0.5,
    "seed": 1,
}
ENGINE = {"name": "vllm", "variant": "0.21.0", "max_model_len": 60000, "num_gpu_blocks": 40000}


@pytest.fixture(scope="module")
def server() -> RunResult:
    document = {
        "name": "sessions",
        "workload": {"sessions": SESSIONS},
        "engine": ENGINE,
        "profile": "assumed-costs.json",
    }
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "s.yaml", document)).values()))
    return run_scenario(scenario, HERE, intervals=False)


def test_access_lines_determine_counts_lengths_and_hits(server: RunResult, tmp_path: Path) -> None:
    path = emit(tmp_path / "log", {"run": server}, ("vllm-log-access",))[0]
    read_stage([path], tmp_path / "out")
    rebuilt, _ = rebuild_stage(tmp_path / "out", UserSettings())
    true = list(server.record.requests.values())
    rows = rebuilt.rows
    prompts = np.array([life.request.prompt_tokens for life in true])
    assert len(rows.prompt_tokens) == len(true)
    assert rows.prompt_tokens.mean() == pytest.approx(prompts.mean(), rel=0.05)
    outputs = np.mean([life.tokens for life in true])
    assert rows.output_tokens.mean() == pytest.approx(outputs, rel=0.05)
    found = sum(life.chunks[0].context for life in true) / prompts.sum()
    sessions = rebuilt.observed["session"]
    previous = pd.Series(rows.prompt_tokens).groupby(sessions.to_numpy()).shift(fill_value=0)
    assert previous.sum() / rows.prompt_tokens.sum() == pytest.approx(found, abs=0.03)


def test_requests_in_the_system_follow_the_lines(server: RunResult, tmp_path: Path) -> None:
    """The number of requests agrees between the lines, every 5 s, and in the mean time in the
    system (Little's law).
    """
    path = emit(tmp_path / "log", {"run": server}, ("vllm-log-access",))[0]
    evidence = read_stage([path], tmp_path / "out")
    rebuilt, _ = rebuild_stage(tmp_path / "out", UserSettings())
    assert evidence.series is not None
    lines = evidence.series["t_s"].to_numpy() - float(evidence.series["t_s"].iloc[0]) + 10.0
    true = list(server.record.requests.values())
    came = np.sort([life.request.arrival for life in true])
    left = np.sort([life.ended_at or 0.0 for life in true])
    begin = rebuilt.observed["t_s"].to_numpy() - float(evidence.series["t_s"].iloc[0]) + 10.0
    end = np.sort(begin + rebuilt.observed["e2e_ms"].to_numpy() / 1e3)
    at = np.arange(5.0, lines[-1], 5.0)
    present = np.searchsorted(came, at) - np.searchsorted(left, at)
    found = np.searchsorted(np.sort(begin), at) - np.searchsorted(end, at)
    assert np.abs(found - present).mean() < 0.1 * present.mean()
    assert (end.mean() - begin.mean()) == pytest.approx(left.mean() - came.mean(), rel=0.1)


def test_count_without_access_lines_cannot_be_determined(server: RunResult, tmp_path: Path) -> None:
    path = emit(tmp_path / "log", {"run": server}, ("vllm-log",))[0]
    read_stage([path], tmp_path / "out")
    with pytest.raises(UndeterminedError, match=r"number of requests cannot be determined: .* to"):
        rebuild_stage(tmp_path / "out", UserSettings())


def test_cache_too_small_for_sessions_cannot_be_determined(tmp_path: Path) -> None:
    crowded = SESSIONS | {"num_sessions": 50, "request_rate": 2.0, "think_time": 5.0, "seed": 4}
    document = {
        "name": "sessions",
        "workload": {"sessions": crowded},
        "engine": ENGINE | {"num_gpu_blocks": 6000},
        "profile": "assumed-costs.json",
    }
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "s.yaml", document)).values()))
    run = run_scenario(scenario, HERE, intervals=False)
    path = emit(tmp_path / "log", {"run": run}, ("vllm-log-access",))[0]
    read_stage([path], tmp_path / "out")
    with pytest.raises(UndeterminedError, match="sessions cannot be determined: the KV cache"):
        rebuild_stage(tmp_path / "out", UserSettings())


def windows(count: int, held: float = float("nan")) -> LogWindows:
    """Return windows of 10 s; each computes 900 prompt tokens and 100 output tokens."""
    full = np.full(count, 1.0)
    end = np.arange(1, count + 1) * full * 10.0
    return LogWindows(
        end, 10 * full, 900 * full, 100 * full, full, 0 * full, held * full, full, 0.5 * full
    )


def test_evicted_prompts_are_lost_hits() -> None:
    came, prompts, sessions = np.array([0.0, 60.0]), np.array([500.0, 500.0]), np.array([7, 7])
    cut = windows(9, held=1000.0)  # the server allocates 1,000 tokens in 10 s
    assert lost_hit_share(cut, came, prompts, sessions, 100_000.0) == 0.0
    assert lost_hit_share(cut, came, prompts, sessions, 1_500.0) == 0.5
    assert lost_hit_share(cut, came, prompts, np.array([7, 8]), 1_500.0) == 0.0
    assert lost_hit_share(cut, came, prompts, sessions, float("nan")) == 0.0


def test_sessions_without_pauses_continue_earlier() -> None:
    came, added = np.arange(40.0), np.full(40, 160.0)
    # one session: each prompt extends the previous prompt
    target = np.cumsum(160.0 * np.arange(40))
    prompts, sessions, _ = assign_sessions(came, added, target, 2.0, 16)
    assert len(set(sessions.tolist())) == 1
    assert prompts.sum() == pytest.approx(target[-1] + added.sum(), rel=0.02)


def test_lengths_that_disagree_with_the_hit_rate_cannot_be_determined() -> None:
    cut = windows(4)
    tokens = PromptTokens(cut.prompt, 20 * cut.prompt)  # the cache was warm before the log
    known = KnownEngine(float("nan"), 16, 100_000, 0.95)
    prompts, sessions = np.full(4, 1000.0), np.arange(4)
    with pytest.raises(UndeterminedError, match="lengths of the prompts cannot be determined"):
        _check_sessions(cut, tokens, cut.end, prompts, sessions, known)


def test_hits_count_until_the_first_preemption() -> None:
    lines = series([10.0, 20.0, 30.0], [4, 4, 4]).assign(
        waiting=[9, 9, 9], preemptions=0, hit_rate=[0.1, 0.6, 0.9]
    )
    assert _hit_share(lines) == 0.9
    assert _hit_share(lines.assign(preemptions=[0, 0, 3])) == 0.6
    assert _hit_share(lines.assign(usage=[0.5, 0.5, 0.99])) == 0.6


def series(times: list[float], running: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"t_s": times, "engine": 0, "running": running, "waiting": 0, "usage": 0.1})


@pytest.mark.parametrize(
    ("counts", "arrived"),
    [([4, 1, 1, 0], [4, 5, 6, 6]), ([0, 2, 1, 3], [4, 5, 6, 6])],
    ids=["streamed", "whole answers"],
)
def test_access_lines_are_arrivals_or_completions(counts: list[int], arrived: list[int]) -> None:
    times = [10.0, 20.0, 30.0, 40.0]
    access = pd.DataFrame(
        {
            "from_s": [0.0, 10.0, 20.0, 30.0],
            "t_s": times,
            "accepted": counts,
            "rejected": 0,
            "failed": 0,
        }
    )
    table, already = arrivals_from_access(access, series(times, [4, 3, 3, 0]), 0)
    assert already == 0
    assert np.searchsorted(table["t_s"], times, "right").tolist() == arrived


def test_log_that_starts_in_the_middle_has_requests_in_the_server() -> None:
    access = pd.DataFrame(
        {"from_s": [0.0], "t_s": [10.0], "accepted": [2], "rejected": 0, "failed": 0}
    )
    table, already = arrivals_from_access(access, series([10.0, 20.0], [7, 5]), 0)
    assert (already, len(table)) == (5, 7)


def test_first_access_lines_are_from_before_the_first_statistics_line() -> None:
    counts = AccessCounts(100)
    for at in (10.0, 20.0, 30.0):
        for _ in range(50):
            counts.add(200, None if at == 10.0 else at - 10.0, timed=False)
        counts.close(at)
    access = counts.frame()
    assert access is not None
    table, _ = arrivals_from_access(access, series([10.0, 20.0, 30.0], [5, 5, 5]), 0)
    assert np.histogram(table["t_s"], [0.0, 10.0, 20.0, 30.0])[0].tolist() == [50, 50, 50]


def test_departures_keep_the_growth_constant() -> None:
    came = np.arange(0.05, 10.0, 0.1)  # 100 arrivals within 10 s
    left = departure_times(came, 0.0, 10.0, 20.0, 80)
    at = np.arange(1.0, 11.0)
    present = np.searchsorted(came, at) - np.searchsorted(left, at, "right")
    assert present == pytest.approx(2.0 * at, abs=1.0)
    assert departure_times(came, 0.0, 10.0, 100.0, 0).tolist() == []


def _rebuilt_later_part(path: Path, folder: Path, lines: int) -> tuple[RebuiltWorkload, float]:
    """Rebuild a log without its first ``lines`` statistics lines; return the workload and its first
    time (s).
    """
    text = path.read_text(encoding="utf-8").splitlines(keepends=True)
    stats = [place for place, line in enumerate(text) if "Avg prompt throughput" in line]
    path.write_text("".join(text[stats[lines - 1] + 1 :]), encoding="utf-8")
    evidence = read_stage([path], folder)
    size = {"num_gpu_blocks": 40000, "max_model_len": 60000, "enable_prefix_caching": False}
    rebuilt, _ = rebuild_stage(folder, UserSettings(overrides=size, version="0.21.0"))
    assert evidence.series is not None
    return rebuilt, float(evidence.series["t_s"].iloc[0]) - 10.0


def test_log_from_the_middle_begins_with_running_requests(tmp_path: Path) -> None:
    arrivals = {"num_prompts": 700, "request_rate": 3.0, "prompt_tokens": 600, "seed": 2}
    outputs = {"distribution": "lognormal", "mean": 800, "sigma": 0.6}
    document = {
        "name": "plain",
        "workload": {"arrivals": arrivals | {"output_tokens": outputs}},
        "engine": ENGINE | {"enable_prefix_caching": False},
        "profile": "assumed-costs.json",
    }
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "s.yaml", document)).values()))
    run = run_scenario(scenario, HERE, intervals=False)
    path = emit(tmp_path / "log", {"run": run}, ("vllm-log",))[0]
    rebuilt, begin = _rebuilt_later_part(path, tmp_path / "out", 8)
    true = [life for life in run.record.requests.values() if (life.ended_at or 0.0) > 80.0]
    running = sum(life.request.arrival < 80.0 for life in true)
    assert running > 10
    assert (rebuilt.observed["t_s"] < begin).sum() == pytest.approx(running, rel=0.4)
    assert len(rebuilt.observed) == pytest.approx(len(true), rel=0.15)


def test_sessions_of_a_log_from_the_middle_have_warm_prompts() -> None:
    came, added = np.arange(20.0), np.full(20, 160.0)
    target = np.cumsum(np.full(20, 3200.0))  # each prompt finds 3,200 tokens from before the log
    prompts, sessions, before = assign_sessions(came, added, target, 30.0, 16, warm=True)
    assert len(set(sessions.tolist())) == 20
    assert before == pytest.approx(np.full(20, 3200.0))
    assert prompts == pytest.approx(np.full(20, 3360.0))
    table = _warm_up(before, until=100.0, token_s=1e-4)
    assert table["t_s"].iloc[-1] == pytest.approx(100.0 - 2 * 0.32)
    assert table["t_s"].is_monotonic_increasing
    assert not assign_sessions(came, added, target, 30.0, 16)[2].any()


def test_prompts_of_warm_sessions_follow_the_tokens_in_the_cache() -> None:
    cut = replace(windows(6, held=5058.0), firsts=np.full(6, 2.0))
    tokens = PromptTokens(cut.prompt, 2 * cut.prompt)
    found = tokens_in_cache(cut, tokens, 100.0, 16)
    assert found.whole == pytest.approx(np.full(6, 2 * 5000.0))
    unknown = tokens_in_cache(windows(6), tokens, 100.0, 16)
    assert unknown is tokens


def test_initial_state_follows_the_first_window() -> None:
    cut = replace(windows(6), running=np.full(6, 8.0), waiting=np.full(6, 3.0))
    assert with_initial_state(cut).initial_running == 8
    assert with_initial_state(cut).initial_waiting == 3
    # the engine was idle in half of the first window
    begun = replace(cut, output=cut.output * [0.2, 1, 1, 1, 1, 1])
    assert with_initial_state(begun).initial_running == 0


def test_rejected_requests_are_no_arrivals() -> None:
    access = pd.DataFrame(
        {"from_s": [0.0], "t_s": [10.0], "accepted": [3], "rejected": 5, "failed": 1}
    )
    table, _ = arrivals_from_access(access, series([10.0, 20.0], [3, 3]), 0)
    assert len(table) == 4


def test_log_and_metrics_are_aligned_by_shape(server: RunResult, tmp_path: Path) -> None:
    log = emit(tmp_path / "log", {"run": server}, ("vllm-log",))[0]
    metrics = emit(tmp_path / "metrics", {"run": server}, ("prometheus",))[0]
    one, other = read_source(log), read_source(metrics)
    assert one.series is not None
    moved = Evidence(
        one.source,
        engine="vllm",
        series=one.series.assign(t_s=one.series["t_s"] - 400 * 86400 + 4321),
    )
    found = join([moved, other])
    assert found.series is not None
    years = 731 * 86400  # the log has no year: 2024 is assumed, but the metrics are from 2026
    expected = one.series["t_s"].to_numpy() + years
    assert other.series is not None
    moved_times = sorted(set(found.series["t_s"]) - set(other.series["t_s"]))
    assert moved_times == pytest.approx(expected, abs=10)
    assert any("its times were shifted" in note for note in found.notes)


def test_fitted_requests_cover_the_whole_incident() -> None:
    rows, warm_up = choose_fitted_rows(10_000)
    assert (rows[0], rows[-1], len(rows)) == (0, 9999, 1000)
    assert not warm_up[:200].any()
    assert warm_up[200:250].all()
    rows, warm_up = choose_fitted_rows(900)
    assert len(rows) == 900
    assert not warm_up.any()


def test_long_log_is_limited_to_its_worst_part() -> None:
    times = [10.0 * i for i in range(5000)]
    lines = series(times, [5] * 5000).assign(waiting=[9 * (3000 < i < 3100) for i in range(5000)])
    found = select_worst_part(Evidence("server.log", series=lines))
    assert found.series is not None
    assert len(found.series) == MAX_PART_LINES
    assert found.series["waiting"].sum() == lines["waiting"].sum()
    assert "only its worst" in found.notes[-1]
