"""Data of the plots of a report, as columns for the JSON data of the page.

To reduce the size of pages, times are integer ticks (see ``TickScale``) and columns are compressed
by ``pack_column``. Equal runs give equal data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simkv.core.outcome import Outcome
from simkv.explain.blame import Preemption
from simkv.explain.diagnosis import Diagnosis
from simkv.explain.ledger_kinds import LedgerKind, LedgerSegment
from simkv.explain.wait_attribution import find_block_holdings
from simkv.explain.wait_ledger import find_pauses, find_wasted_segments
from simkv.metrics.run_metrics import e2e, ttft
from simkv.report.lanes_plot import sample_lanes
from simkv.report.narrative import sort_by_waiting
from simkv.report.plot_style import sort_requests_by_arrival
from simkv.report.pressure_plot import bin_column
from simkv.sim.run_record import RunRecord

Floats = npt.NDArray[np.float64]

#: Maximum number of requests whose blocks are shown separately.
MAX_OWNERS = 8
#: Number of bins of a time axis.
BINS = 240
#: Maximum number of points of a cumulative curve.
CURVE_POINTS = 200
#: Maximum number of steps of a variant in a page.
MAX_STEPS = 100_000
#: Maximum number of lane stretches in a page, which limits its size.
MAX_STRETCHES = 400_000

#: States of a lane by code: the kinds of the wait ledger, and two states after a request's end.
CODES = [*(kind.value for kind in LedgerKind), "gone", "wasted"]


class TickScale:
    """Conversion of seconds to integer ticks.

    A tick is at most a millionth of ``span``, the duration of the run in seconds.
    """

    def __init__(self, span: float) -> None:
        self.exponent = math.floor(math.log10(span)) - 6 if span > 0.0 else -6

    @property
    def seconds(self) -> float:
        """Duration of a tick in seconds."""
        return 10.0**self.exponent

    def __call__(self, seconds: float | None) -> int | None:
        return None if seconds is None else self.of(seconds)

    def of(self, seconds: float) -> int:
        """Return the number of ticks nearest to ``seconds``."""
        return round(seconds * 10.0**-self.exponent)


def request_columns(record: RunRecord, ticks: TickScale) -> dict[str, Any]:
    """Return one column per property of a request, in order of arrival."""
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
    """Return the intervals of each request's lane in the plot, as pairs (index in CODES, end in s).

    The intervals start at the arrival, and include work of the engine after the end of the request.
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
    """Return the lanes of requests as columns.

    ``shows`` is the result of ``find_lane_stretches``. If it has more than ``most`` intervals, some
    requests are left out. In the result, ``of`` contains the indices of the requests in order of
    arrival. ``count`` contains the number of intervals of each lane. ``kinds`` contains one letter
    per interval; ``A`` is the first entry of CODES. ``lasts`` contains the duration of each
    interval in ticks.
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


def step_columns(record: RunRecord, ticks: TickScale) -> dict[str, Any]:
    """Return one column per property of a step, for at most MAX_STEPS steps.

    ``every`` is N if every Nth step is included. ``last`` is the duration of a step. ``gap`` is the
    time between the end of the previous included step and the start of the step, in ticks.
    """
    log = record.steps
    every = max(math.ceil(len(log) / MAX_STEPS), 1)
    gaps: list[int] = []
    lasts: list[int] = []
    reached = 0
    for start, end in zip(log.start[::every], log.end[::every], strict=True):
        begin = max(ticks.of(start), reached)
        gaps.append(begin - reached)
        reached = max(ticks.of(end), begin)
        lasts.append(reached - begin)
    columns = {
        "gap": gaps,
        "last": lasts,
        "prefill": log.prefill_tokens[::every],
        "prefills": log.prefill_seqs[::every],
        "decodes": log.decode_seqs[::every],
        "waiting": log.waiting[::every],
        "running": log.running[::every],
        "free": log.free_blocks[::every],
    }
    return {
        "every": every,
        "columns": {name: pack_column(list(column)) for name, column in columns.items()},
    }


def holding_columns(
    record: RunRecord, places: Sequence[int], block_size: int, ticks: TickScale
) -> dict[str, Any]:
    """Return the changes of the number of blocks held by the given requests.

    ``places`` contains the indices of the requests in order of arrival. ``block_size`` is in
    tokens. In the result, ``count`` contains the number of changes per request, and ``changes`` the
    number of blocks gained or lost. ``gaps`` contains the ticks since the previous change of the
    request, or since time 0.
    """
    lives = sort_requests_by_arrival(record)
    counts: list[int] = []
    gaps: list[int] = []
    changes: list[int] = []
    for place in places:
        before = len(gaps)
        reached, held, until = 0, 0, 0.0
        for one in find_block_holdings(record, lives[place], block_size):
            steps = [(one.start, one.blocks)]
            if held and one.start > until:
                steps.insert(0, (until, 0))
            for at, blocks in steps:
                gaps.append(ticks.of(at) - reached)
                changes.append(blocks - held)
                reached, held = ticks.of(at), blocks
            until = one.end
        if held:
            gaps.append(ticks.of(until) - reached)
            changes.append(-held)
        counts.append(len(gaps) - before)
    return {"count": counts, "gaps": gaps, "changes": changes}


def preemption_arrows(
    record: RunRecord, found: Diagnosis, ticks: TickScale, most: int
) -> list[list[Any]]:
    """Return preemptions as [time, victim, beneficiary, reason, tokens].

    Victim and beneficiary are indices of requests in order of arrival. The beneficiary is the
    request that gets the freed blocks, or -1 for several. At most ``most`` preemptions are
    returned, evenly spaced.
    """
    place = {life.request.id: index for index, life in enumerate(sort_requests_by_arrival(record))}
    every = found.preemptions
    step = max(math.ceil(len(every) / max(most, 1)), 1)
    return [[ticks(p.at), place[p.victim], _sake(p, place), p.why, p.tokens] for p in every[::step]]


def block_owners(record: RunRecord, block_size: int, edges: Floats) -> dict[str, Any]:
    """Return the mean number of blocks held in each time bin.

    Each of the requests with the most blocks has a series. The series ``others`` is the total of
    all other requests. If requests share blocks, the values are scaled so that their sum is the
    number of used blocks.
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
    """Return the time-weighted mean of a step function in each bin; ``spans`` are (start, end,
    value).
    """
    starts, ends, values = (np.asarray(column) for column in zip(*spans, strict=True))
    times = np.column_stack([starts, ends]).ravel()
    areas = np.column_stack([np.zeros(len(starts)), (ends - starts) * values]).ravel()
    order = np.argsort(times, kind="stable")
    held: Floats = np.diff(np.interp(edges, times[order], np.cumsum(areas[order])))
    return held / np.diff(edges)


def step_log_columns(record: RunRecord, edges: Floats) -> dict[str, list[Any]]:
    """Return minimum, mean and maximum of columns of the step log in each time bin."""
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
    """Round to three significant digits. NaN becomes None."""
    return [None if math.isnan(value) else shorten_number(value, 3) for value in series]


def shorten_number(value: float, digits: int = 5) -> float:
    """Round to ``digits`` significant digits. Whole numbers become integers."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def pack_column(column: Sequence[Any]) -> Sequence[Any] | dict[str, list[Any]]:
    """Run-length encode the column as ``{"runs": [value, count, …]}`` if the result is shorter."""
    runs: list[Any] = []
    for value in column:
        if runs and runs[-2] == value:
            runs[-1] += 1
        else:
            runs += [value, 1]
    return {"runs": runs} if len(runs) < len(column) else column


def cumulative_curve(seconds: Iterable[float | None], among: int) -> list[list[float]]:
    """Return the cumulative distribution of durations as [[seconds, percent], …].

    A percentage of 100 corresponds to ``among`` requests.
    """
    values = sorted(value for value in seconds if value is not None)
    if not values or not among:
        return []
    picks = sorted({round(i * (len(values) - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)})
    return [[shorten_number(values[i]), shorten_number(100.0 * (i + 1) / among)] for i in picks]


def blocker_texts(record: RunRecord, found: Diagnosis) -> dict[str, list[list[Any]]]:
    """Return the main blockers of requests as [id, seconds], by id of the waiting request.

    Only the requests that failed or waited longest are included.
    """
    return {
        str(life.request.id): [
            [who.id, shorten_number(who.seconds, 3)]
            for who in found.blockers_of(life.request.id)[:3]
        ]
        for life in sort_by_waiting(record, found)
    }


def time_bins(end: float) -> Floats:
    """Return the bin edges of a page's time axis."""
    return np.linspace(0.0, end or 1.0, BINS + 1)


def split_fairly(wanted: Sequence[int], most: int) -> list[int]:
    """Divide ``most`` among entries that need the amounts ``wanted``.

    No entry gets more than it needs. Entries that get less get equal amounts.
    """
    granted = [0] * len(wanted)
    left, open_ = most, sorted(range(len(wanted)), key=lambda i: wanted[i])
    for done, i in enumerate(open_):
        granted[i] = min(wanted[i], left // (len(open_) - done))
        left -= granted[i]
    return granted


def _sake(taken: Preemption, place: Mapping[int, int]) -> int:
    """Return the index of the request that benefits from a preemption, or -1 for several."""
    return -1 if taken.by is None or taken.by == taken.victim else place[taken.by]
