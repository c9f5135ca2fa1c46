"""Compare the results directories of two runs: metrics, outcomes of requests, and decisions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from simkv.core.errors import InputError
from simkv.core.figure_registry import METRICS, OVER_ALL, figure
from simkv.core.input_files import read_text
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
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
#: Metrics that are listed first; the others follow by decreasing relative change.
MAIN_FIGURES = (
    "finished",
    "output_throughput",
    "ttft_ms.mean",
    "ttft_ms.median",
    "ttft_ms.p99",
    "tpot_ms.mean",
    "e2e_ms.mean",
    "e2e_ms.p99",
)
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

    ``settings`` contains pairs of scenario fields by path; None means that the field is absent.
    ``figures`` contains pairs of metric values by name. ``outcomes`` contains pairs of outcomes by
    request id; the outcome of a missing request is "absent".
    """

    before: str
    after: str
    settings: Mapping[str, tuple[Any, Any]]
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
        """Whether the results have no differences. The settings may differ."""
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
    scenarios = [load(folder / "scenario.yaml") for folder in (before, after)]
    steps = []
    for folder, place in ((before, 0), (after, 1)):
        steps.append(_steps(scenarios[place], folder, [pair[place] for pair in pairs]))
        if advance:
            advance()
    return RunDiff(
        tuple(
            VariantDiff(
                one,
                other,
                _settings(scenarios[0].get(one), scenarios[1].get(other)),
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


def _steps(
    scenarios: Mapping[str, Scenario], folder: Path, names: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """Simulate the scenarios of a run again, and return the steps of the variants ``names``."""
    return {
        name: run_scenario(scenarios[name], folder, intervals=False).step_rows(name)
        for name in names
        if name in scenarios
    }


def _settings(before: Scenario | None, after: Scenario | None) -> dict[str, tuple[Any, Any]]:
    """Return the fields of two scenarios that differ, with defaults of the engine."""
    if before is None or after is None:
        return {}
    one, other = (
        dict(
            _flat({name: getattr(which, name) for name in Scenario.model_fields if name != "name"})
        )
        for which in (before, after)
    )
    paths = dict.fromkeys([*one, *other])
    pairs = {path: (one.get(path), other.get(path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field in nested models and dataclasses."""
    if isinstance(node, BaseModel):
        node = {name: getattr(node, name) for name in type(node).model_fields}
    elif is_dataclass(node) and not isinstance(node, type):
        node = {one.name: getattr(node, one.name) for one in fields(node)}
    elif isinstance(node, list | tuple):
        node = dict(enumerate(node))
    if not isinstance(node, Mapping):
        yield path, node
        return
    for name, value in node.items():
        yield from _flat(value, f"{path}.{name}" if path else str(name))


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
        for one in found.variants:
            yield from _describe_settings(one)
        yield "No differences: metrics, outcomes and decisions are equal."
        return
    for name in found.only:
        yield f"{name}: only in one of the runs"
    for one in found.variants:
        yield f"{one.before} → {one.after}:" if one.before != one.after else f"{one.before}:"
        yield from _describe_settings(one)
        yield from _describe_figures(one)
        yield from _describe_outcomes(one)
        yield from _describe_step(one)


def _describe_settings(one: VariantDiff) -> Iterator[str]:
    for path, (before, after) in [*one.settings.items()][:LISTED]:
        yield f"  setting {path}: {before} → {after}"
    if len(one.settings) > LISTED:
        yield f"  and {len(one.settings) - LISTED} more settings"


def _listed(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main metrics and then the others.

    A latency of all requests is omitted if it equals the latency of finished requests.
    """
    finished = {all_: key for key, all_ in OVER_ALL.items()}
    copies = set()
    for name, pair in figures.items():
        key, _, statistic = name.partition(".")
        if key in finished and figures.get(f"{finished[key]}.{statistic}") == pair:
            copies.add(name)
    names = [name for name in MAIN_FIGURES if name in figures]
    names += [name for name in figures if name not in names and name not in copies]
    return {name: figures[name] for name in names}


def _describe_figures(one: VariantDiff) -> Iterator[str]:
    if not one.figures:
        yield "  metrics: equal"
    figures = _listed(one.figures)
    for name, (before, after) in [*figures.items()][:LISTED]:
        metric = METRICS[name]
        shown = ["none" if value is None else metric.format(value) for value in (before, after)]
        size = _size(before, after)
        change = ""
        if before is not None and after is not None and size != float("inf"):
            change = f" ({(after - before) / before:+.1%})"
        yield f"  {metric.label:<28} {shown[0]} → {shown[1]}{change}"
    if len(figures) > LISTED:
        yield f"  and {len(figures) - LISTED} more metrics"


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
