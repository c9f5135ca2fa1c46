"""Check the results of a scenario's variants against its expectations.

Expectations are defined in ``simkv.scenario.expectations``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simkv.core.figure_registry import figure
from simkv.metrics.run_result import RunResult
from simkv.scenario.expectations import Bound, iterate_expectations


@dataclass(frozen=True)
class ExpectationCheck:
    """An expectation of one variant, and the value in the result.

    ``figure`` is the name of the metric, and ``found`` its value. ``found`` is None if the event
    that the metric measures never occurred, such as the first token of a request. ``missed_by`` is
    the distance of the value from the expected bound; it is None if the expectation holds, if the
    values are text, or if ``found`` is None.
    """

    variant: str
    figure: str
    expected: str
    found: float | str | None
    ok: bool
    missed_by: float | None = None

    def __str__(self) -> str:
        missed = f", missed by {self.missed_by:+.6g}" if self.missed_by else ""
        return f"{self.figure} {self.expected}: found {format_found(self.found)}{missed}"


def format_found(found: float | str | None) -> str:
    """Format a metric as text; a missing value becomes ``none``."""
    if found is None:
        return "none"
    return found if isinstance(found, str) else f"{found:.10g}"


def check_expectations(results: Mapping[str, RunResult]) -> list[ExpectationCheck]:
    """Check every expectation of the scenario against the results of its variants.

    ``results`` maps the names of the variants to their results.
    """
    checks: list[ExpectationCheck] = []
    for variant, result in results.items():
        expected = result.scenario.expect.get(variant)
        if expected is None:
            continue
        for name, bound in iterate_expectations(expected):
            checks.append(_check(variant, name, bound, figure(result.summary, name)))
        rows = {row["id"]: row for row in result.request_rows(variant)}
        for i, of_request in expected.request.items():
            for name, bound in iterate_expectations(of_request):
                checks.append(_check(variant, f"request {i} {name}", bound, rows[i][name]))
    return checks


#: Verdicts of runs that count as successful.
SERVED_VERDICTS = ("served", "cut_off")


def exit_code(results: Iterable[RunResult], checks: Sequence[ExpectationCheck]) -> int:
    """Return the exit code of a run.

    The exit code is 0 if all requests were served, 1 if an expectation is missed, and 3 if not all
    requests were served. If the scenario has expectations and all of them hold, the exit code is 0
    even if requests failed.
    """
    if checks:
        return int(not all(found.ok for found in checks))
    return 0 if all(result.summary["verdict"] in SERVED_VERDICTS for result in results) else 3


def _check(
    variant: str, name: str, bound: Bound | str, found: float | str | None
) -> ExpectationCheck:
    if isinstance(bound, str):
        return ExpectationCheck(variant, name, f"= {bound}", found, ok=found == bound)
    if found is None or isinstance(found, str):
        return ExpectationCheck(variant, name, str(bound), found, ok=False)
    missed = bound.missed_by(found)
    return ExpectationCheck(variant, name, str(bound), found, not missed, missed or None)
