"""Scores of measured points as tables: on the console, and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from simkv.costs.operators.spreads import Configuration
from simkv.proof.validation.silicon.fit import Fitted
from simkv.proof.validation.silicon.rows import ANCHORS
from simkv.proof.validation.silicon.samples import Residual
from simkv.proof.validation.silicon.score import NAMES, Errors, GroupScore, Noise
from simkv.proof.validation.silicon.slopes import MOVED, Floats
from simkv.report.fitting import Fitting, fitting

HEAD = (
    *("group", "rows", "meas.", "answered"),
    *("latency", "MAPE", "strict", "median", "in 90 %", "half-width"),
    *ANCHORS,
)


def score_rows(scores: Sequence[GroupScore]) -> Iterator[list[str]]:
    """Two rows for each group: TTFT and TPOT; all but the counts in per cent."""
    for s in scores:
        for name in NAMES:
            first = name == NAMES[0]
            begin = [s.name, str(s.rows), str(s.measurements), _percent(s.answered)]
            yield [*(begin if first else [""] * 4), name.upper(), *_cells(s.errors[name])]


def _cells(e: Errors) -> list[str]:
    told = [_percent(e.coverage), _percent(e.width)]
    others = [e.anchors.get(tool) for tool in ANCHORS]
    beside = ["" if o is None else f"{_percent(o[0])} ({_percent(o[1])})" for o in others]
    return [_percent(e.mape), _percent(e.strict), _signed(e.bias), *told, *beside]


def _percent(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.1f}"


def _signed(value: float) -> str:
    return "-" if value != value else f"{100 * value:+.1f}"


def score_table(title: str, scores: Sequence[GroupScore]) -> Group:
    """A group of scores for the console; the latency stands beside the group there."""
    moved = [0, 4, 5, 7, 8, 9, 1, 2, 3, 6, *range(10, len(HEAD))]
    rows = ([row[i] for i in moved] for row in score_rows(scores))
    return _titled(title, fitting([HEAD[i] for i in moved], rows, left=2, kept=3))


def _titled(title: str, table: Fitting) -> Group:
    return Group(Text(title, "italic"), table)


def noise_lines(found: Sequence[Noise]) -> Iterator[str]:
    """What two measurements of one configuration differ by."""
    for n in found:
        yield (
            f"{n.name}: {n.pairs} pairs of one configuration differ by a median of "
            f"{100 * n.ttft:.1f} % (TTFT) and {100 * n.tpot:.1f} % (TPOT)"
        )


FIT_HEAD = ("constants by", "number", "TTFT", "TPOT", "TTFT, pair left out", "TPOT, pair left out")


def fit_rows(fitted: Fitted) -> Iterator[list[str]]:
    """What constants bring on points that they were not fitted to: MAPE in per cent."""
    for tried in fitted.tried:
        chosen = " (chosen)" if tried.name == fitted.chosen else ""
        errors = [_percent(float(e)) for e in (*tried.configurations, *tried.groups)]
        yield [f"{tried.name}{chosen}", str(tried.number), *errors]


CONSTANT_HEAD = ("of", *(re.sub("_s$", " (ms)", name) for name in MOVED))


def constant_rows(rules: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    """What constants change of a kind, a row for each rule; ms where they are times."""
    for rule in rules:
        cells = []
        for name in MOVED:
            value = rule["constants"].get(name)
            scale = 1000.0 if name.endswith("_s") else 1.0
            cells.append("" if value is None else f"{scale * value:.4g}")
        yield [", ".join(rule["kind"].values()), *cells]


def fit_table(fitted: Fitted) -> Group:
    """The same for the console."""
    return _titled("constants, MAPE in per cent", fitting(FIT_HEAD, fit_rows(fitted)))


def left_out_table(title: str, samples: Sequence[Residual], logs: Floats) -> Group:
    """Errors on left-out measurements, by class and by group."""
    rows = []
    names = [(_class_of(s.kind), s.kind.levels()[0]) for s in samples]
    for column in (0, 1):
        for name in sorted({n[column] for n in names}):
            own = logs[[n[column] == name for n in names]]
            errors, signed = np.abs(np.exp(-own) - 1.0), np.exp(-own) - 1.0
            cells = []
            for index in range(2):
                cells.append(_percent(float(errors[:, index].mean())))
                cells.append(_signed(float(np.median(signed[:, index]))))
            rows.append([name, str(len(own)), *cells])
    head = ("group", "meas.", "TTFT", "TTFT median", "TPOT", "TPOT median")
    return _titled(f"{title}, per cent", fitting(head, rows))


def _class_of(kind: Configuration) -> str:
    if kind.backend == "sglang":
        return "SGLang"
    return "dense on vLLM" if kind.mlp == "dense" else "MoE on vLLM"
