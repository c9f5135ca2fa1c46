"""What a run prints: a block per variant as ``vllm bench serve`` prints it, then comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from simkv.core.figures import LATENCIES, OF_FLEETS, STATISTICS, figure, heading
from simkv.core.outcome import FAILURES, Outcome, in_words
from simkv.measure.expect import Check, show
from simkv.measure.result import Result
from simkv.report.published import Comparison
from simkv.scenario.scenario import Scenario

WIDTH = 50
_PER_TABLE = 7
_SIDE_BY_SIDE = (
    "finished",
    *FAILURES,
    "makespan_s",
    "output_throughput",
    "ttft_ms.mean",
    "ttft_ms.p99",
    "itl_ms.p99",
    "e2e_ms.mean",
    "e2e_ms.p99",
    "longest_stall_s",
    "preemptions",
    "recomputed_tokens",
    "jain_index",
    "steps",
)
#: Figures whose intervals are printed; all are in ``summary.json``.
_WITH_INTERVALS = (
    "makespan_s",
    "output_throughput",
    *(f"{key}.{name}" for key in LATENCIES for name in ("mean", "p99")),
    "preemptions",
)
_COUNTS = ("total_input_tokens", "total_output_tokens")
_RATES = ("request_throughput", "output_throughput", "total_token_throughput")
_SCHEDULING = ("preemptions", "recomputed_tokens", "longest_stall_s")


def results_parts(
    results: dict[str, Result], comparisons: Sequence[Comparison]
) -> Iterator[RenderableType]:
    """Everything about a run: lines, and tables."""
    scenario = next(iter(results.values())).scenario
    yield f"{scenario.name}: {scenario.summary}".rstrip(": ")
    if scenario.report:
        yield f"Replays {scenario.report}"
    for variant, result in results.items():
        yield ""
        yield from _block(variant, result)
    if len(results) > 1:
        yield "\nVariants side by side"
        names = list(results)
        for start in range(0, len(names), _PER_TABLE):
            part = names[start : start + _PER_TABLE]
            yield _side_by_side({name: results[name] for name in part})
    if comparisons:
        yield "\nPublished beside simulated"
        yield _published(comparisons)
        for variant, published in scenario.published.items():
            if published.note and variant in results:
                yield f"{variant}: {published.note}"
    yield from _provenance(scenario, results)


def checks_table(checks: Sequence[Check]) -> Table:
    """Each expectation with ``ok`` or ``missed``, what was found and how far off it was."""
    table = Table(box=box.SIMPLE)
    for name in ("", "variant", "figure", "expected"):
        table.add_column(name)
    for name in ("found", "missed by"):
        table.add_column(name, justify="right")
    for check in checks:
        ok = "ok" if check.ok else "missed"
        by = "" if check.missed_by is None else f"{check.missed_by:+.6g}"
        table.add_row(ok, check.variant, check.figure, check.expected, show(check.found), by)
    return table


def _block(variant: str, result: Result) -> Iterator[str]:
    figures = result.summary
    failed = figures["requests"] - figures["finished"]
    yield f"{' Serving Simulation Result ':=^{WIDTH}}"
    yield _row("Variant:", variant)
    yield _row("Engine:", f"{result.scenario.engine.name} {result.scenario.engine.variant}")
    yield _row("Successful requests:", figures["finished"])
    yield _row("Failed requests:", failed)
    for outcome in FAILURES:
        if figures[outcome]:
            yield _row(f"  {outcome.word}:", figures[outcome])
    yield _row("Benchmark duration (s):", figures["makespan_s"])
    yield from _rows(figures, (*_COUNTS, *_RATES))
    for key, (_, title) in LATENCIES.items():
        yield f"{title:-^{WIDTH}}"
        yield from _rows(figures, (f"{key}.{name}" for name in STATISTICS))
    yield f"{'Scheduling':-^{WIDTH}}"
    yield from _rows(figures, _SCHEDULING)
    yield _row("Starved requests:", figures["starved"])
    yield from _rows(figures, ("jain_index",))
    if fleet := figures.get("fleet"):
        yield from _fleet(fleet)
    yield "=" * WIDTH
    yield f"Ending: {figures['verdict']}: {figures['verdict_detail']}"
    for verdict in result.diagnosis.verdicts:
        yield f"  {verdict.name}: {verdict.text}"
    for note in result.notes:
        yield f"Note: {note}"
    yield f"Fidelity: {result.fidelity.note}"
    for key in _WITH_INTERVALS:
        if ends := result.fidelity.intervals.get(key):
            value = _number(figure(figures, key))
            yield f"  {_label(key):<32}{value:>12}   from {_number(ends[0])} to {_number(ends[1])}"


#: Columns of the table of replicas: figure, heading, width, decimals.
_REPLICA = (
    ("requests", "requests", 9, 0),
    ("finished", "finished", 9, 0),
    ("utilisation", "busy %", 8, 1),
    ("mean_ttft_ms", "TTFT ms", 10, 1),
    ("preemptions", "preempted", 10, 0),
    ("hit_rate", "hits %", 8, 1),
)
#: The console shows so many replicas; all are in summary.json.
_MOST_REPLICAS = 16


def _fleet(fleet: dict[str, Any]) -> Iterator[str]:
    """The fleet's own figures, and a line per replica."""
    yield f"{'Fleet':-^{WIDTH}}"
    yield _row("Replicas:", fleet["replicas"])
    yield from _rows({"fleet": fleet}, OF_FLEETS)
    yield f"{'replica':<8}" + "".join(f"{heading:>{width}}" for _, heading, width, _ in _REPLICA)
    for row in fleet["by_replica"][:_MOST_REPLICAS]:
        percent = {"utilisation": 100.0, "hit_rate": 100.0}
        yield f"{row['replica']:<8}" + "".join(
            f"{row[key] * percent.get(key, 1):>{width}.{decimals}f}"
            for key, _, width, decimals in _REPLICA
        )
    if (more := len(fleet["by_replica"]) - _MOST_REPLICAS) > 0:
        yield f"... and {more} more: see summary.json"


def _label(name: str) -> str:
    """What a figure is called; as ``vllm bench serve`` says it, E2EL."""
    return heading(name).replace("E2E ", "E2EL ")


def _rows(figures: dict[str, Any], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield _row(f"{_label(name)}:", figure(figures, name))


def _row(label: str, value: Any) -> str:
    return f"{label:<40}{_number(value):<10}".rstrip()


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _side_by_side(results: dict[str, Result]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for variant in results:
        table.add_column(variant, justify="right", overflow="fold")
    table.add_row("Ending", *(in_words(result.summary["verdict"]) for result in results.values()))
    for key in _SIDE_BY_SIDE:
        values = [figure(result.summary, key) for result in results.values()]
        if any(values) or key not in FAILURES or key == Outcome.STARVED:
            table.add_row(_label(key), *(_number(value) for value in values))
    return table


def _published(comparisons: Sequence[Comparison]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("variant", "figure"):
        table.add_column(name)
    for name in ("published", "simulated", "error"):
        table.add_column(name, justify="right")
    for row in comparisons:
        simulated = "none" if row.simulated is None else f"{row.simulated:.2f}"
        table.add_row(row.variant, row.figure, row.told, simulated, row.verdict)
    return table


def _provenance(scenario: Scenario, results: dict[str, Result]) -> Iterator[str]:
    """What was given, fitted and assumed, and how good each cost profile is."""
    sources = scenario.provenance
    for title, lines in (
        ("Given", sources.given),
        ("Fitted", sources.fitted),
        ("Assumed", sources.assumed),
    ):
        if lines:
            yield f"\n{title}"
            for line in lines:
                yield f"  - {line}"
    yield "\nCosts"
    profiles = {p.name: p for result in results.values() for p in result.profiles.values()}
    for profile in profiles.values():
        rms = "" if profile.fit.rms_s is None else f", rms error {profile.fit.rms_s:g} s"
        points = f", points: {profile.fit.points}{rms}" if profile.fit.points else ""
        yield f"  - {profile.name} ({profile.gpu}): {profile.basis}{points}"
