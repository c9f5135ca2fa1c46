"""Tables of the scores of measured points, for the console and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.text import Text

from simkv.report.adaptive_table import AdaptiveTable, make_adaptive_table
from simkv.validation.serving_points.measured_rows import OTHER_TOOLS
from simkv.validation.serving_points.point_scores import (
    METRIC_NAMES,
    GroupScore,
    LatencyErrors,
    Noise,
)

HEAD = (
    *("group", "rows", "meas.", "answered"),
    *("metric", "MAPE", "strict", "median", "in 90 %", "half-width", "interval score"),
    *OTHER_TOOLS,
)


def score_rows(scores: Sequence[GroupScore]) -> Iterator[list[str]]:
    """Yield a table row for each metric of each group. All values except counts are in percent."""
    for s in scores:
        for name in METRIC_NAMES:
            first = name == METRIC_NAMES[0]
            begin = [s.name, str(s.rows), str(s.measurements), percent(s.answered)]
            yield [*(begin if first else [""] * 4), _title(name), *_cells(s.errors[name])]


def _title(name: str) -> str:
    return name.upper() if name in ("ttft", "tpot") else name


def _cells(e: LatencyErrors) -> list[str]:
    told = [percent(e.coverage), percent(e.width), percent(e.interval_score)]
    others = [e.anchors.get(tool) for tool in OTHER_TOOLS]
    beside = ["" if o is None else f"{percent(o[0])} ({percent(o[1])})" for o in others]
    return [percent(e.mape), percent(e.strict), signed(e.bias), *told, *beside]


def percent(value: float | None) -> str:
    """Return a fraction as a percentage with one digit, or "-" if unknown."""
    return "-" if value is None or value != value else f"{100 * value:.1f}"


def signed(value: float) -> str:
    """Return a fraction as a percentage with sign and one digit, or "-" if unknown."""
    return "-" if value != value else f"{100 * value:+.1f}"


def score_table(title: str, scores: Sequence[GroupScore]) -> Group:
    """Return a console table of group scores, with one row per group and metric."""
    moved = [0, 4, 5, 7, 8, 9, 10, 1, 2, 3, 6, *range(11, len(HEAD))]
    rows = ([row[i] for i in moved] for row in score_rows(scores))
    return titled(title, make_adaptive_table([HEAD[i] for i in moved], rows, left=2, kept=3))


def titled(title: str, table: AdaptiveTable) -> Group:
    """Return a table with the given title."""
    return Group(Text(title, "italic"), table)


def noise_lines(found: Sequence[Noise]) -> Iterator[str]:
    """Yield a sentence about the measurement noise of each group."""
    for n in found:
        yield (
            f"{n.name}: {n.pairs} pairs of results have the same configuration; their median "
            f"difference is "
            f"{100 * n.ttft:.1f} % (TTFT) and {100 * n.tpot:.1f} % (TPOT)"
        )
