"""Find requests that a server's log counts but that no source of single requests contains.

A server exports a span when a request ends. Requests that their clients cancelled while they waited
have none, although they filled the queue.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.incident.evidence import Evidence, sum_over_ranks
from simkv.incident.log_windows import build_windows, can_build_windows, split_by_engine

Floats = npt.NDArray[np.float64]
#: Missing requests count as cancelled if they emitted less than this fraction of the
#: tokens of the other requests, relative to their numbers in the system.
MAX_EMITTED_SHARE = 0.75
#: Differences up to this fraction of the requests in the system, and up to this number of requests,
#: may result from the times of log lines, which are whole seconds.
ACCEPTED_SHARE, ACCEPTED_COUNT = 0.1, 2.0


def add_missing_requests(evidence: Evidence) -> Evidence:
    """Return the evidence with arrivals of requests that only the statistics lines count.

    Their clients are assumed to have cancelled them after the longest time that another request was
    in the system. Their outputs are as long as the longest known output, so that none ends earlier.
    If the requests emitted tokens like others, the evidence gets an entry in ``lacks`` instead.
    """
    requests, series = evidence.requests, evidence.series
    if requests is None or evidence.arrivals is not None or not can_build_windows(series):
        return evidence
    assert series is not None
    known = requests.dropna(subset=["e2e_ms"])
    if not len(known):
        return evidence
    at, logged, missing = _count_missing(known, series)
    if not missing.any():
        return evidence
    share = 1.0 - _token_share(known, series)
    if share >= MAX_EMITTED_SHARE * missing.sum() / logged.sum():
        lack = (
            f"requests with {100 * share:.0f} % of the logged output tokens (they are in no input; "
            "spans may be sampled)"
        )
        return replace(evidence, lacks=(lack, *evidence.lacks))
    patience = float(known["e2e_ms"].max()) / 1e3
    times = _arrival_times(at, missing, patience)
    longest = int(known["output_tokens"].max())
    note = (
        f"about {len(times)} requests are counted in the statistics lines but are in no other "
        f"input; their clients are assumed to have cancelled them after {patience:.1f} s, the "
        "longest time of an answered request"
    )
    columns = {"max_tokens": longest, "prompt_tokens": 0, "gave_up_s": patience, "request": None}
    arrivals = pd.DataFrame({"t_s": times, **columns})
    return replace(evidence, arrivals=arrivals, notes=(*evidence.notes, note))


def _count_missing(known: pd.DataFrame, series: pd.DataFrame) -> tuple[Floats, Floats, Floats]:
    """Return the times of statistics lines, and the numbers of logged and of missing requests."""
    present = sum_over_ranks(series)[["running", "waiting"]].sum(axis="columns")
    at, logged = present.index.to_numpy(np.float64), present.to_numpy(np.float64)
    begin = np.sort(known["t_s"].to_numpy(np.float64))
    end = np.sort((known["t_s"] + known["e2e_ms"] / 1e3).to_numpy(np.float64))
    inside = np.searchsorted(begin, at, "right") - np.searchsorted(end, at, "right")
    per_second = len(known) / max(end[-1] - begin[0], 1.0)
    accepted = np.maximum(ACCEPTED_SHARE * logged, max(ACCEPTED_COUNT, per_second))
    return at, logged, np.where(logged - inside > accepted, logged - inside, 0.0)


def _token_share(known: pd.DataFrame, series: pd.DataFrame) -> float:
    """Return the output tokens of the requests as a fraction of the logged ones."""
    cuts = [build_windows(lines, np.nan) for lines in split_by_engine(series).values()]
    begin, end = min(cut.begin[0] for cut in cuts), max(cut.end[-1] for cut in cuts)
    last = (known["t_s"] + known["e2e_ms"] / 1e3).to_numpy(np.float64)
    first = (known["t_s"] + known["ttft_ms"].fillna(0.0) / 1e3).to_numpy(np.float64)
    decoded = np.clip(last, begin, end) - np.clip(first, begin, end)
    emitted = float((known["output_tokens"] * decoded / np.maximum(last - first, 1e-9)).sum())
    return emitted / max(sum(float(cut.output.sum()) for cut in cuts), 1.0)


def _arrival_times(at: Floats, missing: Floats, patience: float) -> Floats:
    """Return arrival times of requests that leave after ``patience`` seconds, so that ``missing``
    of them are in the system at the times ``at``.
    """
    times, arrived = [float(at[0] - np.median(np.diff(at, append=at[-1] + 1)))], [0.0]
    for now, count in zip(at.tolist(), missing.tolist(), strict=True):
        left = float(np.interp(now - patience, times, arrived))
        times.append(now)
        arrived.append(max(arrived[-1], count + left))
    numbers = np.arange(int(arrived[-1])) + 0.5
    counts = np.array(arrived) + 1e-9 * np.arange(len(arrived))  # increasing, for ``interp``
    return np.asarray(np.interp(numbers, counts, times))
