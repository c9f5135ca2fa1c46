"""Common style of plots: colors, sizes, and reproducible output files."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simkv.core.atomic_files import atomic_file
from simkv.core.outcome import Outcome
from simkv.sim.run_record import RequestRecord, RunRecord

if TYPE_CHECKING:  # HTML pages use these colors without matplotlib
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Color-blind safe palettes of M. Okabe and K. Ito and of P. Tol.
BLUE, SKY = "#0072B2", "#56B4E9"
YELLOW, RED, PURPLE, BROWN = "#F0E442", "#D55E00", "#AA3377", "#8C510A"
GREY, SLATE, DARK = "#D4D4D4", "#666666", "#222222"


class Mark(NamedTuple):
    """Marker of a failed request in plots."""

    colour: str
    marker: str


FAILURE_MARKS: dict[Outcome, Mark] = {
    Outcome.STARVED: Mark(RED, "X"),
    Outcome.TIMED_OUT: Mark(BROWN, "v"),
    Outcome.STALLED: Mark(PURPLE, "s"),
    Outcome.LOST: Mark(PURPLE, "P"),
    Outcome.REJECTED: Mark(PURPLE, "D"),
    Outcome.CANCELLED: Mark("#777777", "|"),
    Outcome.CUT_OFF: Mark("#777777", ">"),
}

WIDTH = 10.0  # inches; 1500 pixels, readable at half size
DPI = 150
_SETTINGS: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,
    "figure.constrained_layout.use": True,
}


@contextmanager
def plot_settings() -> Iterator[None]:
    """Use simkv's plot settings within the context."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def set_log_scale(axes: Axes, which: str, subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Make the ``x`` or ``y`` axis logarithmic, with plain numbers as tick labels.

    ``subs`` are the multiples of each power of ten that have ticks.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG file without version or date in its metadata.

    Raises InputError if the file cannot be written.
    """
    with atomic_file(path) as new:
        figure.savefig(new, format="png", dpi=DPI, metadata={"Software": None})
    return path


def sort_requests_by_arrival(record: RunRecord) -> list[RequestRecord]:
    """Return the request records in order of arrival, then id."""
    return sorted(
        record.requests.values(), key=lambda life: (life.request.arrival, life.request.id)
    )


def find_end_time(records: Iterable[RunRecord]) -> float:
    """Return the latest end of any request or step, in seconds."""
    ends = [0.0]
    for record in records:
        ends += [life.ended_at for life in record.requests.values() if life.ended_at is not None]
        ends += [min(end, record.end) for end in record.steps.end[-1:]]
    return max(ends)


def draw_panel_title(axes: Axes, variant: str, record: RunRecord, columns: int) -> None:
    """Set the title of a panel: the variant, its number of finished requests, and its failures."""
    count = Counter(life.outcome for life in record.requests.values())
    failed = [outcome for outcome in FAILURE_MARKS if count[outcome]]
    name = textwrap.fill(variant, 96 // columns)
    served = f"{count[Outcome.FINISHED]} of {len(record.requests)} finished"
    unserved = ", ".join(f"{count[outcome]} {outcome.replace('_', ' ')}" for outcome in failed)
    lines = textwrap.wrap(unserved, 80 // columns)
    beside = len(served + unserved) <= 92 // columns
    axes.set_title("\n".join([name, served, *([] if beside else [""] * len(lines))]), loc="left")
    if failed:
        colour = FAILURE_MARKS[failed[0]].colour
        axes.set_title("\n".join(lines), loc="right", color=colour, fontweight="bold")


def number_requests(axis_of: Axes, which: str, lives: Sequence[RequestRecord]) -> None:
    """Label the indices on the ``x`` or ``y`` axis with the ids of ``lives``."""
    from matplotlib.ticker import MaxNLocator

    axis = axis_of.xaxis if which == "x" else axis_of.yaxis
    ids = {place: str(life.request.id) for place, life in enumerate(lives)}
    axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axis.set_major_formatter(lambda place, _: ids.get(round(place), ""))


def mark_failures(
    axes: Axes, failed: Mapping[Outcome, Sequence[tuple[float, float]]], size: float
) -> None:
    """Draw a marker at each point (x, y) in ``failed``, in data coordinates.

    The shape of the marker depends on the outcome.
    """
    for outcome, mark in FAILURE_MARKS.items():
        points = failed.get(outcome)
        if points:
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                mark.marker,
                color=mark.colour,
                mec=DARK,
                mew=0.5 if size > 4.0 else 0.0,
                ms=size,
                clip_on=False,
                zorder=4,
            )


def columns_for(panels: int) -> int:
    """Return the number of columns of a grid with the given number of narrow panels."""
    return max(panels, 1) if panels <= 3 else 2 if panels == 4 else 3


def mark_halt(axes: Axes, record: RunRecord, label: bool = True) -> None:
    """Draw a line at the time at which the engine halted, labeled with the cause."""
    stop = record.engine_halt
    if stop is None:
        return
    axes.axvline(stop.since, color=DARK, linewidth=1.4, linestyle=(0, (4, 2)), zorder=5)
    if not label:
        return
    left, right = axes.get_xlim()
    across = (stop.since - left) / (right - left)
    side, shift = (
        ("left", 5) if across < 0.35 else ("right", -5) if across > 0.65 else ("center", 0)
    )
    axes.annotate(
        f"{stop.kind} at {stop.since:.1f} s",
        (stop.since, 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(shift, 0),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=10,
        fontweight="bold",
        color=DARK,
        bbox={"facecolor": "white", "edgecolor": DARK, "linewidth": 0.8, "pad": 2.5},
        zorder=6,
    )


def failure_legend(seen: Iterable[Outcome | None]) -> list[Artist]:
    """Return legend entries for the failures among ``seen``."""
    from matplotlib.lines import Line2D

    found = set(seen)
    return [
        Line2D(
            [],
            [],
            linestyle="",
            marker=mark.marker,
            color=mark.colour,
            mec=DARK,
            label=outcome.label,
        )
        for outcome, mark in FAILURE_MARKS.items()
        if outcome in found
    ]


def _abreast(handles: Sequence[Artist]) -> int:
    """Return the number of legend entries that fit next to each other."""
    longest = max((len(str(handle.get_label())) for handle in handles), default=1)
    return int(WIDTH / (0.45 + 0.075 * longest))


def title_and_legend(figure: Figure, title: str, handles: Sequence[Artist]) -> None:
    """Add the title of a plot, and below it one legend for all panels."""
    figure.legend(
        handles=list(handles),
        title="\n".join(textwrap.wrap(title, 85)),
        title_fontproperties={"weight": "bold", "size": 12},
        alignment="left",
        loc="outside upper left",
        ncols=max(min(len(handles), 5 if len(handles) < 10 else 4, _abreast(handles)), 1),
        frameon=False,
        borderpad=0.2,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
    )
