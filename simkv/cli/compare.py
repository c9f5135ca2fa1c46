"""``simkv compare``: simulate two launch commands on the same requests and compare the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import AsJson, Jobs, Overrides, print_json, progress, show
from simkv.cli.scenario_flags import add_scenario_flags, build_from, options_of, print_notes
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from simkv.scenario.scenario import Scenario
    from simkv.study.change_check import ChangeCheck, FigureChange

#: Number of requests listed.
LISTED = 5


def compare(
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            help="Largest acceptable increase of a latency, or decrease of a throughput, as a "
            "fraction.",
        ),
    ] = 0.05,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of random seeds (default: 6 if the load is random, otherwise 1)."
        ),
    ] = None,
    set_: Overrides = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
    **described: Any,
) -> None:
    """Compare two launch commands on the same requests.

    Give --from-command twice: the launch command before the change, then the launch command after
    it. The output shows the change of each metric and the requests that become slower. Each change
    has a range, which covers different random seeds and the error of the step times. Exit 1 if a
    metric gets worse by more than the tolerance in its whole range. Exit 2 for bad input.
    """
    from simkv.study.change_check import check_change
    from simkv.study.random_seeds import find_seed

    lines = described.pop("from_command") or []
    if len(lines) != 2:
        raise InputError(
            f"--from-command: expected two launch commands, one before and one after the change; "
            f"found {len(lines)}"
        )
    before, after = (
        _scenario({**described, "from_command": line}, set_ or [], label)
        for label, line in zip(("before", "after"), lines, strict=True)
    )
    count = seeds or (1 if find_seed(before.workload) is None else 6)
    with progress("runs") as advance:
        found = check_change(
            before,
            after,
            Path(),
            seeds=count,
            tolerance=tolerance,
            jobs=jobs,
            advance=lambda done, total: advance(done, total),
        )
    if as_json:
        from simkv.report.json_answers import build_compare_answer

        print_json(build_compare_answer(found, tolerance))
    else:
        show(*_describe(found, tolerance))
    if found.beyond(tolerance):
        raise typer.Exit(1)


def _scenario(values: dict[str, Any], overrides: list[str], label: str) -> Scenario:
    """Return the scenario of one launch command; print notes on it to standard error."""
    from simkv.scenario.scenario_loader import resolve_variants

    built = build_from(options_of(values))
    scenario = resolve_variants(built.document, overrides)["run"]
    print_notes(built, f"{label}: ")
    return scenario


def _describe(found: ChangeCheck, tolerance: float) -> Iterator[str]:
    from simkv.core.figure_registry import METRICS

    over = "errors of step times" if found.with_errors else "no error of step times is known"
    yield f"{found.requests:,} requests, {found.seeds} seeds, {over}; change and its range:"
    beyond, unsure = found.beyond(tolerance), found.unsure(tolerance)
    for one in found.figures:
        metric = METRICS[one.name]
        mark = "  WORSE" if one in beyond else "  possibly worse" if one in unsure else ""
        yield (
            f"  {metric.label:<28} {metric.format(one.before)} → {metric.format(one.after)}: "
            f"{one.change:+.1%} ({one.low:+.1%} to {one.high:+.1%}){mark}"
        )
    yield (
        f"Requests with the first seed whose E2E latency grows by more than {tolerance:.0%}: "
        f"{len(found.worse):,}; shrinks: {len(found.better):,}"
    )
    for changed in found.worse[:LISTED]:
        if changed.before is None or changed.after is None:
            yield f"  request {changed.id}: {changed.outcome_before} → {changed.outcome_after}"
        else:
            yield (
                f"  request {changed.id}: {changed.before:.2f} s → {changed.after:.2f} s "
                f"({changed.seconds:+.2f} s)"
            )
    if unsure:
        yield (
            f"Possibly worse by more than {tolerance:.0%}: {_names(unsure)}; part of the range is "
            "within the tolerance"
        )
    yield (
        f"Result: worse than before by more than {tolerance:.0%} in the whole range: "
        f"{_names(beyond)}"
        if beyond
        else f"Result: no metric is worse than before by more than {tolerance:.0%} in its whole "
        "range"
    )


def _names(changes: Iterable[FigureChange]) -> str:
    from simkv.core.figure_registry import METRICS

    return ", ".join(METRICS[one.name].label for one in changes)


add_scenario_flags(compare, several=("from_command",))
