"""Tests of latencies over all requests: a request without an answer counts with its waiting
time.
"""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.figure_registry import STATISTICS
from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.metrics.censored_latency import CensoredLatency, compute_censored_latency
from simkv.metrics.run_metrics import e2e, ttft
from simkv.sim.run_record import RequestRecord

SHARES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}
SECONDS = st.lists(st.floats(0.0, 1e3), max_size=12).map(sorted)


def life(i: int, outcome: Outcome, ended: float, first: float | None = None) -> RequestRecord:
    found = RequestRecord(
        Request(i, prompt_tokens=1, output_tokens=2, max_tokens=2, arrival=1.0),
        outcome,
        first_token=first,
        ended_at=ended,
        received_at=1.0,
    )
    found.last_token = ended if outcome is Outcome.FINISHED else first
    return found


def test_statistics_match_a_hand_computation() -> None:
    lives = [
        life(0, Outcome.FINISHED, 4.0, 2.0),  # TTFT 1, E2E 3
        life(1, Outcome.STARVED, 11.0, 3.0),  # TTFT 2, then waited 10 for the other tokens
        life(2, Outcome.TIMED_OUT, 11.0),  # waited 10
        life(3, Outcome.REJECTED, 1.5),  # not admitted
    ]
    first = compute_censored_latency(lives, ttft).figures_ms()
    assert first["mean"] == pytest.approx(13_000 / 3)
    assert first["median"] == 2000.0
    assert first["censored"] == 1
    # the median is known in spite of missing values
    assert first["at_least"] == ["mean", "p90", "p95", "p99"]
    whole = compute_censored_latency(lives, e2e).figures_ms()
    assert (whole["mean"], whole["censored"]) == (pytest.approx(23_000 / 3), 2)
    assert whole["at_least"] == list(STATISTICS)


def test_without_requests_there_is_no_latency() -> None:
    found = compute_censored_latency([life(0, Outcome.REJECTED, 1.0)], ttft).figures_ms()
    assert found == {**dict.fromkeys(STATISTICS), "censored": 0, "at_least": []}


@given(SECONDS, SECONDS)
def test_bounds_use_shortest_and_longest_latencies(
    known: list[float], censored: list[float]
) -> None:
    found = CensoredLatency(known, censored)
    if not known and not censored:
        assert found.at_least("mean") is found.at_most("mean") is None
        return
    low = np.array(known + censored)
    high = np.array(known + [inf] * len(censored))
    for name, share in SHARES.items():
        assert found.at_least(name) == pytest.approx(float(np.percentile(low, share)))
        place = share / 100 * (len(high) - 1)
        ends = np.sort(high)[[int(place), int(np.ceil(place - 1e-12))]]
        most = found.at_most(name)
        if np.isfinite(ends).all():
            assert most == pytest.approx(float(np.interp(place % 1, [0, 1], ends)), abs=1e-6)
        else:
            assert most is None
    assert found.at_least("mean") == pytest.approx(float(low.mean()))
    assert found.at_most("mean") == (None if censored else found.at_least("mean"))
