"""Plot of one lane per request over time: waiting, running and failed requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.core.outcome import SERVED, Outcome
from simkv.explain.ledger_kinds import LedgerKind, LedgerSegment
from simkv.explain.wait_ledger import build_ledger, find_pauses, find_wasted_segments
from simkv.report.plot_style import (
    BLUE,
    BROWN,
    GREY,
    PURPLE,
    RED,
    SKY,
    WIDTH,
    YELLOW,
    draw_panel_title,
    failure_legend,
    find_end_time,
    mark_failures,
    mark_halt,
    number_requests,
    sort_requests_by_arrival,
    title_and_legend,
)
from simkv.sim.run_record import RequestRecord, RunRecord

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

#: Maximum number of lanes in a plot; if there are more requests, they are sampled.
MAX_LANES = 200

#: States of a lane: label and color, in the order of the legend.
BARS: dict[str, tuple[str, str]] = {
    "waiting": ("waiting", GREY),
    "prefill": ("prefill", BLUE),
    "decode": ("decode", SKY),
    "preempted": ("preempted", YELLOW),
    "starved": ("waited until the client gave up", RED),
    "timed_out": ("waited; too long for its timeout", BROWN),
    "failed": ("waited; the engine failed", PURPLE),
    "gone": ("after the client left", "#F4F4F4"),
    "wasted": ("computed after the client left", "#8C97AB"),
}
HATCHED: dict[str, Any] = {"hatch": "////", "edgecolor": "#B0B6C2", "linewidth": 0.0}


class Bar(NamedTuple):
    """An interval of a request's lane, in seconds. ``kind`` is a key of BARS."""

    kind: str
    start: float
    end: float


#: Lane states for some kinds of the wait ledger; all other kinds are waiting.
STATES = {
    LedgerKind.PREFILL: "prefill",
    LedgerKind.RECOMPUTE: "prefill",
    LedgerKind.EVICTED: "prefill",
    LedgerKind.DECODE: "decode",
    LedgerKind.PREEMPTED: "preempted",
}


def build_lane_states(intervals: Iterable[LedgerSegment]) -> list[Bar]:
    """Convert the intervals of a request to bars of its lane. Adjacent bars of the same kind are
    merged.
    """
    lane: list[Bar] = []
    for kind, start, end in intervals:
        state = STATES.get(kind, "waiting")
        if lane and lane[-1].kind == state and lane[-1].end == start:
            lane[-1] = lane[-1]._replace(end=end)
        else:
            lane.append(Bar(state, start, end))
    return lane


def build_bars(
    record: RunRecord,
    life: RequestRecord,
    intervals: Iterable[LedgerSegment],
    paused: Sequence[int] | None = None,
) -> list[Bar]:
    """Return the lane of one request, including work of the engine after the request has ended.

    ``intervals`` contains the request's time by cause, and ``paused`` is the result of
    ``find_pauses(record)``. The waiting time of a failed request is labeled by its outcome, unless
    the run ended at its ``horizon``.
    """
    vain = life.outcome and life.outcome.wasted_wait_label
    lane = []
    for bar in build_lane_states(intervals):
        idle = bar.kind in ("waiting", "preempted")
        lane.append(bar._replace(kind=vain) if vain and idle else bar)
    reached = life.ended_at
    for _, start, end in find_wasted_segments(record, life, paused):
        assert reached is not None
        lane += [Bar("gone", reached, start), Bar("wasted", start, end)]
        reached = end
    return lane


def build_lanes(record: RunRecord, shown: Sequence[RequestRecord]) -> list[list[Bar]]:
    """Return the lanes of the requests ``shown``."""
    paused, tiles = find_pauses(record), build_ledger(record, [life.request.id for life in shown])
    return [build_bars(record, life, tiles[life.request.id], paused) for life in shown]


def sample_lanes(lives: Sequence[RequestRecord], most: int = MAX_LANES) -> list[RequestRecord]:
    """Return at most ``most`` of ``lives``, evenly spaced in the order of ``lives``.

    The share of failed requests is at least their share of all requests. A small number of failed
    requests gets up to half of the lanes.
    """
    if len(lives) <= most:
        return list(lives)
    failed = [life for life in lives if life.outcome not in SERVED]
    others = [life for life in lives if life.outcome in SERVED]
    places = max(most * len(failed) // len(lives), min(len(failed), most // 2))
    chosen = {life.request.id for life in _evenly(failed, places)}
    chosen |= {life.request.id for life in _evenly(others, most - places)}
    return [life for life in lives if life.request.id in chosen]


def _evenly(lives: Sequence[RequestRecord], count: int) -> list[RequestRecord]:
    return [lives[index * len(lives) // count] for index in range(count)]


def draw_lanes(records: Mapping[str, RunRecord], title: str) -> Figure:
    """Draw one panel per variant and one lane per request, in order of arrival from the top."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = 1 if len(records) <= 3 else 2
    rows = -(-len(records) // columns)
    most = max((min(len(record.requests), MAX_LANES) for record in records.values()), default=0)
    figure = Figure(figsize=(WIDTH, 0.9 + rows * min(max(1.1 + 0.06 * most, 1.9), 4.5)))
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    end = find_end_time(records.values()) or 1.0
    seen: set[str] = set()
    outcomes: set[Outcome | None] = set()
    for panel, (variant, record) in zip(panels, records.items(), strict=False):
        shown = sample_lanes(sort_requests_by_arrival(record))
        outcomes |= {life.outcome for life in shown}
        seen |= _draw(panel, record, shown, end, 1300 // columns)
        panel.set_ylim(max(most, 1) - 0.5, -0.5)
        draw_panel_title(panel, variant, record, columns)
    for spare in panels[len(records) :]:
        spare.remove()
    for panel in panels[max(len(records) - columns, 0) : len(records)]:
        panel.set_xlabel("time (s)")
        panel.tick_params(labelbottom=True)
    handles: list[Artist] = [
        Patch(facecolor=colour, label=label, **(HATCHED if kind == "gone" else {}))
        for kind, (label, colour) in BARS.items()
        if kind in seen
    ]
    title_and_legend(figure, title, handles + failure_legend(outcomes))
    return figure


def _draw(
    axes: Axes, record: RunRecord, shown: Sequence[RequestRecord], end: float, bins: int
) -> set[str]:
    """Draw the lanes of ``shown`` and return the kinds of their bars."""
    from matplotlib.colors import to_rgb

    edges = np.linspace(0.0, end, bins + 1)
    shares = np.zeros((max(len(shown), 1), len(BARS), bins))
    seen: set[str] = set()
    for place, lane in enumerate(build_lanes(record, shown)):
        shares[place] = _shares(lane, edges)
        seen |= {bar.kind for bar in lane}
        gone = [bar.start for bar in lane if bar.kind == "gone"]
        if gone:
            rest = [(gone[0], lane[-1].end - gone[0])]
            axes.broken_barh(rest, (place - 0.5, 1), fc="none", **HATCHED)
    palette = np.asarray([to_rgb(colour) for _, colour in BARS.values()] + [(1.0, 1.0, 1.0)])
    axes.imshow(
        palette[_pixels(shares)],
        extent=(0.0, end, len(shares) - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )
    if len(shown) <= 80:
        axes.hlines(np.arange(len(shown) + 1) - 0.5, 0.0, end, color="white", linewidth=0.8)
    failed: dict[Outcome, list[tuple[float, float]]] = {}
    for place, life in enumerate(shown):
        if life.outcome is not None and life.ended_at is not None:
            failed.setdefault(life.outcome, []).append((life.ended_at, place))
    mark_failures(axes, failed, min(max(200 / max(len(shown), 1), 2.5), 5.5))
    axes.set_xlim(0.0, end)
    axes.set_ylabel(_which(record, shown))
    number_requests(axes, "y", shown)
    mark_halt(axes, record)
    return seen


def _which(record: RunRecord, shown: Sequence[RequestRecord]) -> str:
    if len(shown) == len(record.requests):
        return "request"
    failed = [life for life in record.requests.values() if life.outcome not in SERVED]
    among = sum(life.outcome not in SERVED for life in shown)
    text = f"request ({len(shown)} of {len(record.requests)} shown"
    return f"{text},\n{among} of {len(failed)} without an answer)" if failed else f"{text})"


def rasterize_lanes(
    record: RunRecord, shown: Sequence[RequestRecord], edges: Floats
) -> npt.NDArray[np.intp]:
    """Return the index in BARS of the color of each lane and time bin, or -1 for no color.

    ``edges`` contains the bounds of the bins in seconds.
    """
    return _pixels(np.stack([_shares(lane, edges) for lane in build_lanes(record, shown)]))


def _shares(lane: Sequence[Bar], edges: Floats) -> Floats:
    """Return the fraction of each time bin that each kind of BARS covers, with shape (kinds,
    bins).
    """
    shares = np.zeros((len(BARS), len(edges) - 1))
    for index, kind in enumerate(BARS):
        spans = [(bar.start, bar.end) for bar in lane if bar.kind == kind]
        if spans:
            times = np.asarray(spans).ravel()
            lengths = np.diff(times, prepend=times[0])
            lengths[0::2] = 0.0  # without the gaps between bars
            shares[index] = np.diff(np.interp(edges, times, np.cumsum(lengths)))
    shares /= edges[1] - edges[0]
    return shares


def _pixels(shares: Floats) -> npt.NDArray[np.intp]:
    """Return the kind to paint for each lane and bin, or -1 for no color.

    ``shares`` has the shape (lanes, kinds, bins). Each kind gets its share of the bins, because
    fractions that are not painted are carried over to later bins.
    """
    lanes, kinds, bins = shares.shape
    owed = np.zeros((lanes, kinds))
    painted = np.full((lanes, bins), -1, dtype=np.intp)
    for column in range(bins):
        share = shares[:, :, column]
        lit = np.flatnonzero(share.sum(axis=1) >= 0.5)
        owed[lit] += share[lit]
        choice = np.where(share > 0.0, owed, -np.inf)[lit].argmax(axis=1)
        owed[lit, choice] -= 1.0
        painted[lit, column] = choice
    return painted
