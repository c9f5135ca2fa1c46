"""Tables of fitted constants and their errors, for the console and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group

from dev.serving_points.constant_fit import Fitted
from dev.serving_points.fit_samples import Residual
from simkv.costs.operators.configuration_kind import Configuration
from simkv.report.adaptive_table import make_adaptive_table
from simkv.validation.serving_points.latency_gradients import FITTED_CONSTANTS, Floats
from simkv.validation.serving_points.point_tables import percent, signed, titled

FIT_HEAD = ("constants by", "number", "TTFT", "TPOT", "TTFT, pair left out", "TPOT, pair left out")


def fit_rows(fitted: Fitted) -> Iterator[list[str]]:
    """Yield a row for each ladder: its number of constants, and its held-out MAPE in percent."""
    for tried in fitted.tried:
        chosen = " (chosen)" if tried.name == fitted.chosen else ""
        errors = [percent(float(e)) for e in (*tried.configurations, *tried.groups)]
        yield [f"{tried.name}{chosen}", str(tried.number), *errors]


CONSTANT_HEAD = ("of", *(re.sub("_s$", " (ms)", name) for name in FITTED_CONSTANTS))


def constant_rows(rules: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each rule: its kind, and the constants that it changes; times are in ms."""
    for rule in rules:
        cells = []
        for name in FITTED_CONSTANTS:
            value = rule["constants"].get(name)
            scale = 1000.0 if name.endswith("_s") else 1.0
            cells.append("" if value is None else f"{scale * value:.4g}")
        yield [", ".join(rule["kind"].values()), *cells]


def fit_table(fitted: Fitted) -> Group:
    """Return the table of ladders for the console."""
    return titled("constants, MAPE in per cent", make_adaptive_table(FIT_HEAD, fit_rows(fitted)))


def left_out_table(title: str, samples: Sequence[Residual], logs: Floats) -> Group:
    """Return the errors of held-out measurements, by class and by group, for the console."""
    rows = []
    names = [(_class_of(s.kind), s.kind.pair) for s in samples]
    for column in (0, 1):
        for name in sorted({n[column] for n in names}):
            own = logs[[n[column] == name for n in names]]
            errors = np.exp(-own) - 1.0
            cells = []
            for index in range(2):
                cells.append(percent(float(np.abs(errors[:, index]).mean())))
                cells.append(signed(float(np.median(errors[:, index]))))
            rows.append([name, str(len(own)), *cells])
    head = ("group", "meas.", "TTFT", "TTFT median", "TPOT", "TPOT median")
    return titled(f"{title}, per cent", make_adaptive_table(head, rows))


def _class_of(kind: Configuration) -> str:
    if kind.backend == "sglang":
        return "SGLang"
    return "dense on vLLM" if kind.mlp == "dense" else "MoE on vLLM"
