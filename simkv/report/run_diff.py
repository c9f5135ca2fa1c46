"""Compare the results directories of two runs: metrics, outcomes of requests, and decisions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.figure_registry import METRICS, figure
from simkv.core.input_files import read_text
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import load

#: Columns of ``steps.csv`` that are compared as decisions; times are consequences of decisions.
DECISIONS = (
    "kind",
    "prefill_seqs",
    "prefill_tokens",
    "decode_seqs",
    "preempted",
    "waiting",
    "running",
)
#: Maximum number of metrics and of requests that are listed.
LISTED = 12
#: Relative difference below which metrics count as equal, because times are equal after rounding to
#: 1 ns.
EQUAL = 1e-9


@dataclass(frozen=True)
class StepDifference:
    """The first step that differs between two runs.

    ``before`` and ``after`` are the rows in steps.csv, or None if the run has ended.
    """

    step: int
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


@dataclass(frozen=True)
class VariantDiff:
    """Differences of a variant between two runs.

    ``figures`` contains pairs of metric values by name. ``outcomes`` contains pairs of outcomes by
    request id; the outcome of a missing request is "absent".
    """

    before: str
    after: str
    figures: Mapping[str, tuple[float | None, float | None]]
    outcomes: Mapping[int, tuple[str, str]]
    step: StepDifference | None


@dataclass(frozen=True)
class RunDiff:
    """Differences between two runs. ``only`` lists the variants that only one run has."""

    variants: tuple[VariantDiff, ...]
    only: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether there are no differences."""
        return not self.only and not any(
            one.figures or one.outcomes or one.step for one in self.variants
        )


def compare_runs(before: Path, after: Path, advance: Callable[[], None] | None = None) -> RunDiff:
    """Compare two results directories of ``simkv run``, variant by variant.

    Variants are matched by name. Two single variants are compared even if their names differ.
    Raises InputError if a directory is not the result of a run.
    """
    runs = [_summary(folder)["variants"] for folder in (before, after)]
    if all(len(run) == 1 for run in runs):
        pairs = [(next(iter(runs[0])), next(iter(runs[1])))]
        only: list[str] = []
    else:
        pairs = [(name, name) for name in runs[0] if name in runs[1]]
        only = sorted(runs[0].keys() ^ runs[1].keys())
    endings = [_outcomes(folder) for folder in (before, after)]
    steps = []
    for folder, place in ((before, 0), (after, 1)):
        steps.append(_steps(folder, [pair[place] for pair in pairs]))
        if advance:
            advance()
    return RunDiff(
        tuple(
            VariantDiff(
                one,
                other,
                _figures(runs[0][one], runs[1][other]),
                _changed(endings[0].get(one, {}), endings[1].get(other, {})),
                _first_difference(steps[0][one], steps[1][other]),
            )
            for one, other in pairs
        ),
        tuple(only),
    )


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("variants"), dict):
        raise InputError(
            f"{folder}: not a results directory; expected a directory written by `simkv run`"
        )
    return found


def _outcomes(folder: Path) -> dict[str, dict[int, str]]:
    """Return the outcome of each request, by variant and request id."""
    path = folder / "requests.csv"
    found: dict[str, dict[int, str]] = {}
    for number, row in enumerate(csv.DictReader(StringIO(read_text(path))), start=2):
        try:
            found.setdefault(row["variant"], {})[int(row["id"])] = row["outcome"]
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"{path}:{number}: not a row of requests.csv") from error
    return found


def _steps(folder: Path, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Simulate the scenario of a run again, and return the steps of the variants ``names``."""
    scenarios = load(folder / "scenario.yaml")
    return {
        name: run_scenario(scenarios[name], folder, intervals=False).step_rows(name)
        for name in names
        if name in scenarios
    }


def _figures(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[float | None, float | None]]:
    """Return the metrics that differ, sorted by decreasing relative change."""
    found = {}
    for name in METRICS:
        try:
            pair = figure(before, name), figure(after, name)
        except (KeyError, TypeError):  # a run of an older version lacks this metric
            continue
        if not _equal(*pair):
            found[name] = pair
    return dict(sorted(found.items(), key=lambda item: -_size(*item[1])))


def _equal(before: Any, after: Any) -> bool:
    if before == after:
        return True
    numbers = [one for one in (before, after) if isinstance(one, int | float)]
    return len(numbers) == 2 and abs(before - after) <= EQUAL * max(abs(before), abs(after))


def _size(before: float | None, after: float | None) -> float:
    if not before or after is None:
        return float("inf")
    return abs(after - before) / abs(before)


def _changed(before: Mapping[int, str], after: Mapping[int, str]) -> dict[int, tuple[str, str]]:
    pairs = {
        number: (before.get(number, "absent"), after.get(number, "absent"))
        for number in sorted(before.keys() | after.keys())
    }
    return {number: pair for number, pair in pairs.items() if pair[0] != pair[1]}


def _first_difference(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> StepDifference | None:
    for number, (one, other) in enumerate(zip_longest(before, after)):
        if one is None or other is None or any(one[name] != other[name] for name in DECISIONS):
            return StepDifference(number, one, other)
    return None


def describe_diff(found: RunDiff) -> Iterator[str]:
    """Yield lines about the differences."""
    if found.same:
        yield "No differences: metrics, outcomes and decisions are equal."
        return
    for name in found.only:
        yield f"{name}: only in one of the runs"
    for one in found.variants:
        yield f"{one.before} → {one.after}:" if one.before != one.after else f"{one.before}:"
        yield from _describe_figures(one)
        yield from _describe_outcomes(one)
        yield from _describe_step(one)


def _describe_figures(one: VariantDiff) -> Iterator[str]:
    if not one.figures:
        yield "  figures: equal"
    for name, (before, after) in [*one.figures.items()][:LISTED]:
        metric = METRICS[name]
        shown = ["none" if value is None else metric.format(value) for value in (before, after)]
        size = _size(before, after)
        change = ""
        if before is not None and after is not None and size != float("inf"):
            change = f" ({(after - before) / before:+.1%})"
        yield f"  {metric.label:<28} {shown[0]} → {shown[1]}{change}"
    if len(one.figures) > LISTED:
        yield f"  and {len(one.figures) - LISTED} more metrics"


def _describe_outcomes(one: VariantDiff) -> Iterator[str]:
    yield f"  requests with another outcome: {len(one.outcomes):,}"
    for number, (before, after) in [*one.outcomes.items()][:LISTED]:
        yield f"    request {number}: {before} → {after}"


def _describe_step(one: VariantDiff) -> Iterator[str]:
    if one.step is None:
        yield "  decisions: equal in every step"
        return
    yield f"  first differing decision: step {one.step.step}"
    for label, row in (("before", one.step.before), ("after", one.step.after)):
        if row is None:
            yield f"    {label}: the run has ended"
            continue
        parts = ", ".join(f"{name} {row[name]}" for name in DECISIONS)
        yield f"    {label}: at {row['start_s']:.6g} s: {parts}"
