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
    """An expectation of one variant, and the simulated value.

    ``figure`` is the name of the metric. ``found`` is its value, or None if there is no value.
    ``missed_by`` is the distance of the value from the bound, or None if the expectation holds.
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
    """Format a metric as text. A missing value becomes ``none``."""
    if found is None:
        return "none"
    return found if isinstance(found, str) else f"{found:.10g}"


def check_expectations(results: Mapping[str, RunResult]) -> list[ExpectationCheck]:
    """Check every expectation of the scenario against the results of its variants, by name."""
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

    The exit code is 1 if an expectation is missed, 3 if the scenario has no expectations and a
    request was not served, and 0 otherwise.
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
