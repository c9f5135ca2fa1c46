"""What the figures of a report are drawn from, as plain columns for the page's JSON.

Times are whole ticks (see ``TickScale``) and columns are ``pack_column``, so that a page is small.
Every function returns lists and dicts of JSON values, the same for the same run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simkv.core.outcome import Outcome
from simkv.explain.blame import Preemption, find_block_holdings
from simkv.explain.diagnosis import Diagnosis
from simkv.explain.wait_ledger import (
    LedgerKind,
    LedgerSegment,
    find_pauses,
    find_wasted_segments,
)
from simkv.metrics.run_metrics import e2e, ttft
from simkv.report.lanes_plot import sample_lanes
from simkv.report.narrative import sort_by_waiting
from simkv.report.plot_style import sort_requests_by_arrival
from simkv.report.pressure_plot import bin_column
from simkv.sim.run_record import RunRecord

Floats = npt.NDArray[np.float64]

#: Requests whose blocks are drawn one by one.
MAX_OWNERS = 8
#: Bins of a time axis.
BINS = 240
#: Points of a cumulative curve.
CURVE_POINTS = 200
#: Stretches of lanes that a page holds in all, so that its size has a bound.
MAX_STRETCHES = 400_000

#: Codes of what a lane can show: the kinds of the ledger, and two that come after a request's end.
CODES = [*(kind.value for kind in LedgerKind), "gone", "wasted"]


class TickScale:
    """Seconds as whole numbers of ticks: a millionth of ``span`` (s) or a little less."""

    def __init__(self, span: float) -> None:
        self.exponent = math.floor(math.log10(span)) - 6 if span > 0.0 else -6

    @property
    def seconds(self) -> float:
        """Length of a tick."""
        return 10.0**self.exponent

    def __call__(self, seconds: float | None) -> int | None:
        return None if seconds is None else self.of(seconds)

    def of(self, seconds: float) -> int:
        """Ticks nearest to ``seconds``."""
        return round(seconds * 10.0**-self.exponent)


def request_columns(record: RunRecord, ticks: TickScale) -> dict[str, Any]:
    """A column per property of a request, in order of arrival."""
    lives = sort_requests_by_arrival(record)
    outcomes = list(Outcome)
    columns: dict[str, list[Any]] = {
        "id": [life.request.id for life in lives],
        "arrival": [ticks(life.request.arrival) for life in lives],
        "ended": [ticks(life.ended_at) for life in lives],
        "prompt": [life.request.prompt_tokens for life in lives],
        "output": [life.request.output_tokens for life in lives],
        "tokens": [life.tokens for life in lives],
        "outcome": [outcomes.index(life.outcome) if life.outcome else 0 for life in lives],
        "first": [ticks(ttft(life)) for life in lives],
        "e2e": [ticks(e2e(life)) for life in lives],
        "preemptions": [len(life.preempted_at) for life in lives],
        "recomputed": [life.recomputed_tokens for life in lives],
    }
    return {name: pack_column(column) for name, column in columns.items()}


def find_lane_stretches(
    record: RunRecord, ledger: Mapping[int, Sequence[LedgerSegment]]
) -> dict[int, list[tuple[int, float]]]:
    """By request what its lane shows: places in CODES and ends (s), from its arrival on.

    After its end come the times at which it was computed for nobody.
    """
    paused = find_pauses(record)
    found = {}
    for i, life in record.requests.items():
        lane = [(CODES.index(interval.kind.value), interval.end) for interval in ledger[i]]
        for _, start, end in find_wasted_segments(record, life, paused):
            lane += [(CODES.index("gone"), start), (CODES.index("wasted"), end)]
        found[i] = lane
    return found


def lane_columns(
    record: RunRecord, shows: Mapping[int, Sequence[tuple[int, float]]], ticks: TickScale, most: int
) -> dict[str, Any]:
    """The lanes of the requests (see ``find_lane_stretches``), of a sample if there are more than
    ``most``.

    ``of`` are places in order of arrival; a lane starts with the arrival, ``kinds`` holds a letter
    per stretch (``A`` is the first of CODES) and ``lasts`` how long it lasts, lane after lane of
    ``count`` stretches.
    """
    lives = sort_requests_by_arrival(record)
    total = sum(map(len, shows.values()))
    shown = sample_lanes(lives, len(lives) * most // total) if total > most else lives
    places = {life.request.id: place for place, life in enumerate(lives)}
    letters: list[str] = []
    lasts: list[int] = []
    for life in shown:
        reached = ticks.of(life.request.arrival)
        for code, end in shows[life.request.id]:
            letters.append(chr(ord("A") + code))
            lasts.append(ticks.of(end) - reached)
            reached = ticks.of(end)
    return {
        "of": [places[life.request.id] for life in shown],
        "count": [len(shows[life.request.id]) for life in shown],
        "kinds": "".join(letters),
        "lasts": lasts,
    }


def preemption_arrows(
    record: RunRecord, found: Diagnosis, ticks: TickScale, most: int
) -> list[list[Any]]:
    """Preemptions: time, places of the victim and of whom it was for (-1: nobody), why, tokens.

    Of more than ``most`` an even sample.
    """
    place = {life.request.id: index for index, life in enumerate(sort_requests_by_arrival(record))}
    every = found.preemptions
    step = max(math.ceil(len(every) / max(most, 1)), 1)
    return [[ticks(p.at), place[p.victim], _sake(p, place), p.why, p.tokens] for p in every[::step]]


def block_owners(record: RunRecord, block_size: int, edges: Floats) -> dict[str, Any]:
    """Mean blocks held per bin of time: the greatest holders one by one, then the rest.

    What is held in all comes from the step log. Where the owners' tables together hold more, they
    share blocks, and each is drawn smaller by the same factor.
    """
    held = {
        i: [
            (h.start, h.end, float(h.blocks)) for h in find_block_holdings(record, life, block_size)
        ]
        for i, life in record.requests.items()
    }
    weight = {i: sum((end - start) * n for start, end, n in spans) for i, spans in held.items()}
    top = sorted((i for i in weight if weight[i] > 0.0), key=lambda i: (-weight[i], i))[:MAX_OWNERS]
    series = np.asarray([_mean(held[i], edges) for i in sorted(top)])
    free = bin_column(record, record.steps.free_blocks, edges).mean
    total = np.nan_to_num(record.num_blocks - free, nan=0.0)
    if len(series):
        sums = series.sum(axis=0)
        series = series * np.minimum(1.0, total / np.maximum(sums, 1e-12))
        total = np.maximum(total - series.sum(axis=0), 0.0)
    return {
        "ids": sorted(top),
        "held": [pack_column(_rounded(row)) for row in series],
        "others": pack_column(_rounded(total)),
        "total": record.num_blocks,
    }


def _mean(spans: Sequence[tuple[float, float, float]], edges: Floats) -> Floats:
    """The mean by time of a step function given as (start, end, value), zero elsewhere."""
    starts, ends, values = (np.asarray(column) for column in zip(*spans, strict=True))
    times = np.column_stack([starts, ends]).ravel()
    areas = np.column_stack([np.zeros(len(starts)), (ends - starts) * values]).ravel()
    order = np.argsort(times, kind="stable")
    held: Floats = np.diff(np.interp(edges, times[order], np.cumsum(areas[order])))
    return held / np.diff(edges)


def step_log_columns(record: RunRecord, edges: Floats) -> dict[str, list[Any]]:
    """Columns of the step log over time: least, mean and greatest value of each per bin."""
    log = record.steps
    columns = {
        "waiting": log.waiting,
        "running": log.running,
        "decodes": log.decode_seqs,
        "prefill": log.prefill_tokens,
    }
    return {
        name: [pack_column(_rounded(series)) for series in bin_column(record, column, edges)]
        for name, column in columns.items()
    }


def _rounded(series: Floats) -> list[float | None]:
    """Three significant digits are enough for a picture; no value is null."""
    return [None if math.isnan(value) else shorten_number(value, 3) for value in series]


def shorten_number(value: float, digits: int = 5) -> float:
    """The number with fewer digits, and without a point if it is whole."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def pack_column(column: Sequence[Any]) -> Sequence[Any] | dict[str, list[Any]]:
    """A column as ``{"runs": [value, times, …]}`` where that is shorter."""
    runs: list[Any] = []
    for value in column:
        if runs and runs[-2] == value:
            runs[-1] += 1
        else:
            runs += [value, 1]
    return {"runs": runs} if len(runs) < len(column) else column


def cumulative_curve(seconds: Iterable[float | None], among: int) -> list[list[float]]:
    """How many requests of ``among`` were there after how long: [[s, share of all in %], …]."""
    values = sorted(value for value in seconds if value is not None)
    if not values or not among:
        return []
    picks = sorted({round(i * (len(values) - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)})
    return [[shorten_number(values[i]), shorten_number(100.0 * (i + 1) / among)] for i in picks]


def blocker_texts(record: RunRecord, found: Diagnosis) -> dict[str, list[list[Any]]]:
    """By request, as text: whom it waited behind, as [id, seconds], first the worst.

    Only for those without an answer and those that waited longest, a few in all.
    """
    return {
        str(life.request.id): [
            [who.id, shorten_number(who.seconds, 3)]
            for who in found.blockers_of(life.request.id)[:3]
        ]
        for life in sort_by_waiting(record, found)
    }


def time_bins(end: float) -> Floats:
    """Edges of the bins of a page's time axis."""
    return np.linspace(0.0, end or 1.0, BINS + 1)


def split_fairly(wanted: Sequence[int], most: int) -> list[int]:
    """How much of ``most`` each gets: what it wants, or where that is too much an equal part."""
    granted = [0] * len(wanted)
    left, open_ = most, sorted(range(len(wanted)), key=lambda i: wanted[i])
    for done, i in enumerate(open_):
        granted[i] = min(wanted[i], left // (len(open_) - done))
        left -= granted[i]
    return granted


def _sake(taken: Preemption, place: Mapping[int, int]) -> int:
    """The place of whom a preemption was for; -1 if for nobody, or for all others."""
    return -1 if taken.by is None or taken.by == taken.victim else place[taken.by]
