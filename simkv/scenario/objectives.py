"""Objectives of a plan: bounds on metrics, such as ``ttft_ms.p99<=500``.

objectives = [parse_objective("ttft_ms.p99<=500"), parse_objective("jain_index>=0.5")]
values = figures(summary)
[objective for objective in objectives if not objective.holds(values)]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simkv.core.errors import InputError, spelling_hint
from simkv.core.figure_registry import FIGURE_NAMES, SESSION_METRICS, figure
from simkv.core.outcome import Outcome

#: Metrics derived from the summary.json metrics, with descriptions.
DERIVED = {
    "unserved": "requests that neither finished nor were cancelled by their clients",
    "preemption_rate": "preemptions per request",
    "recompute_tax": "recomputed tokens per token of finished requests",
    "good": "requests that meet the limits of --goodput",
    "goodput": "requests per second that meet the limits of --goodput",
    "goodput_share": "share of requests that meet the limits of --goodput",
}
#: Derived metrics that require --goodput limits.
GOODPUT_FIGURES = ("good", "goodput", "goodput_share")
OBJECTIVE_FIGURES = (*FIGURE_NAMES, *SESSION_METRICS, *DERIVED)
#: Minimum fraction of good requests that is required if --goodput has limits and no objective
#: bounds it.
DEFAULT_GOODPUT_SHARE = 0.99
#: Metrics of unserved requests; if no objective bounds any of them, all requests must be served.
UNSERVED_FIGURES = {"unserved", *Outcome}

_FORM = re.compile(r"\s*([\w.]+)\s*(<=|>=)\s*(\S+)\s*")


@dataclass(frozen=True)
class Objective:
    """Bound on a metric: at most (``<=``) or at least (``>=``) a ``limit``.

    ``assumed`` is true for a default objective.
    """

    figure: str
    sign: str
    limit: float
    assumed: bool = False

    def __str__(self) -> str:
        return f"{self.figure} {self.sign} {self.limit:g}"

    def holds(self, values: Mapping[str, float | None]) -> bool:
        """Return whether a run with these metrics meets the objective; False if the metric is
        missing.
        """
        return self.slack(values) >= 0.0

    def slack(self, values: Mapping[str, float | None]) -> float:
        """Return the margin to the limit, as a fraction of the limit; negative if the objective is
        not met.

        If the limit is 0, the margin has the unit of the metric. If the metric is missing, it is
        minus infinity.
        """
        value = values.get(self.figure)
        if value is None or math.isnan(value):
            return -math.inf
        room = self.limit - value if self.sign == "<=" else value - self.limit
        if math.isclose(value, self.limit, rel_tol=1e-9, abs_tol=1e-12):
            return 0.0
        return room / (abs(self.limit) or 1.0)

    def worst(self, found: Iterable[float | None]) -> float | None:
        """Return the worst of several values of the metric; None if any value is missing."""
        values = list(found)
        known = [value for value in values if value is not None]
        if len(known) < len(values) or not known:
            return None
        return max(known) if self.sign == "<=" else min(known)


def parse_objective(text: str) -> Objective:
    """Parse ``METRIC<=NUMBER`` or ``METRIC>=NUMBER``. Raises InputError for any other text."""
    found = _FORM.fullmatch(text)
    if not found:
        raise InputError(
            f"--slo {text}: expected METRIC<=NUMBER or METRIC>=NUMBER, as in 'ttft_ms.p99<=500'"
        )
    figure, sign, number = found.groups()
    if figure not in OBJECTIVE_FIGURES:
        raise InputError(
            f"--slo {text}: unknown metric {figure!r}"
            f"{spelling_hint(figure, OBJECTIVE_FIGURES)}; expected "
            f"one of {', '.join(OBJECTIVE_FIGURES)}"
        )
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise InputError(f"--slo {text}: expected a number after {sign}; found {number}")
    if sign == "<=" and limit < 0:
        raise InputError(f"--slo {text}: metrics are never negative; expected at least 0")
    return Objective(figure, sign, limit)


def complete_objectives(
    asked: Sequence[Objective], goodput: Mapping[str, float]
) -> list[Objective]:
    """Return the objectives, completed with the default objectives.

    By default, all requests must be served, and 99 % of the requests must meet the ``goodput``
    limits (ms). Raises InputError if there is no objective, if an objective occurs twice, or if an
    objective bounds goodput without limits.
    """
    if not asked and not goodput:
        raise InputError("--slo: missing; expected an objective, as in 'ttft_ms.p99<=500'")
    keys = [(objective.figure, objective.sign) for objective in asked]
    for objective in asked:
        if keys.count((objective.figure, objective.sign)) > 1:
            raise InputError(
                f"--slo {objective}: the same bound on {objective.figure} is given twice; give "
                "each bound once"
            )
        if objective.figure in GOODPUT_FIGURES and not goodput:
            raise InputError(
                f"--slo {objective}: requires latency limits, such as --goodput ttft:500 tpot:50"
            )
    figures_asked = {objective.figure for objective in asked}
    assumed = []
    if not figures_asked & UNSERVED_FIGURES:
        assumed.append(Objective("unserved", "<=", 0.0, assumed=True))
    if goodput and not figures_asked & set(GOODPUT_FIGURES):
        assumed.append(Objective("goodput_share", ">=", DEFAULT_GOODPUT_SHARE, assumed=True))
    return [*asked, *assumed]


def compute_objective_figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return all metrics of a run that objectives can bound. The value of a metric without samples
    is None.
    """
    values: dict[str, float | None] = {}
    for name in (*FIGURE_NAMES, *SESSION_METRICS, *GOODPUT_FIGURES):
        group = name.partition(".")[0]
        if group not in summary:
            continue
        values[name] = figure(summary, name)
    served = summary["total_input_tokens"] + summary["total_output_tokens"]
    values["unserved"] = summary["requests"] - summary["finished"] - summary["cancelled"]
    values["preemption_rate"] = _ratio(summary["preemptions"], summary["requests"])
    values["recompute_tax"] = _ratio(summary["recomputed_tokens"], served)
    return values


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None if part else 0.0
