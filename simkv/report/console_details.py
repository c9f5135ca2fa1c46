"""Full console report of a run: metrics in the format of ``vllm bench serve``, and comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import RenderableType

from simkv.core.figure_registry import (
    FLEET_METRICS,
    KV_TIER_METRICS,
    LATENCIES,
    OVER_ALL,
    OVER_ALL_TITLE,
    SPEC_DECODE_METRICS,
    STATISTICS,
    figure,
    heading,
)
from simkv.core.outcome import FAILURES, Outcome, humanize
from simkv.metrics.expectation_checks import ExpectationCheck, format_found
from simkv.metrics.run_result import RunResult
from simkv.report.adaptive_table import AdaptiveTable, Column, StackedTable
from simkv.report.narrative import describe_step_times, format_metric
from simkv.report.published_figures import PublishedComparison
from simkv.scenario.launch_defaults import EngineSettings, FieldPath
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.simulation import find_front_end_costs

WIDTH = 50
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
    "ttft_all_ms.mean",
    "ttft_all_ms.p99",
    "e2e_all_ms.mean",
    "e2e_all_ms.p99",
    "longest_stall_s",
    "preemptions",
    "recomputed_tokens",
    "jain_index",
    "steps",
)
#: Metrics with printed intervals; ``summary.json`` has all intervals.
_WITH_INTERVALS = (
    "finished",
    "starved",
    "timed_out",
    "makespan_s",
    "output_throughput",
    *(f"{key}.{n}" for key in (*LATENCIES, *OVER_ALL.values()) for n in ("mean", "p99")),
    "preemptions",
)
_COUNTS = ("total_input_tokens", "total_output_tokens")
_RATES = ("request_throughput", "output_throughput", "total_token_throughput")
_SCHEDULING = ("preemptions", "recomputed_tokens", "longest_stall_s")


def render_results(
    results: dict[str, RunResult], comparisons: Sequence[PublishedComparison]
) -> Iterator[RenderableType]:
    """Yield the lines and tables about a run, including the comparison with published metrics."""
    scenario = next(iter(results.values())).scenario
    yield f"{scenario.name}: {scenario.summary}".rstrip(": ")
    if scenario.report:
        yield f"Replays {scenario.report}"
    for variant, result in results.items():
        yield ""
        yield from _block(variant, result)
    if len(results) > 1:
        yield "\nVariants side by side"
        yield _side_by_side(results)
        if any(_failed(result) for result in results.values()):
            yield "* * of finished requests only"
    if comparisons:
        yield "\nPublished and simulated figures"
        yield _published(comparisons)
        for variant, published in scenario.published.items():
            if published.note and variant in results:
                yield f"{variant}: {published.note}"
    for line in settings_lines(results):
        yield f"\n{line}"
    yield from _provenance(scenario, results)


def render_full_results(
    results: dict[str, RunResult],
    comparisons: Sequence[PublishedComparison],
    checks: Sequence[ExpectationCheck],
) -> Iterator[RenderableType]:
    """Yield the full report of a run, including the checks of its expectations."""
    yield from render_results(results, comparisons)
    if checks:
        yield "\nExpected"
        yield checks_table(checks)


def checks_table(checks: Sequence[ExpectationCheck]) -> AdaptiveTable:
    """Return a table of expectations: ``ok`` or ``missed``, the simulated value and the
    difference.
    """
    by = ["" if check.missed_by is None else f"{check.missed_by:+.6g}" for check in checks]
    return AdaptiveTable(
        [
            Column("", ["ok" if check.ok else "missed" for check in checks], right=False),
            Column("variant", [check.variant for check in checks], right=False),
            Column("figure", [check.figure for check in checks], right=False),
            Column("expected", [check.expected for check in checks], 1, right=False),
            Column("found", [format_found(check.found) for check in checks], 2),
            Column("missed by", by, 3),
        ]
    )


#: Optional sections: the key of their metrics, their title, and the names of the metrics.
_OF_SOME = (
    ("spec_decode", "Speculative Decoding", SPEC_DECODE_METRICS),
    ("kv_tiers", "KV in Host Memory", KV_TIER_METRICS),
)


def _prefix_cache(figures: dict[str, Any]) -> Iterator[str]:
    """Yield a line with the hit rate of the prefix cache, unless there were no hits."""
    if figures["prefix_cache"]["hit_tokens"]:
        yield from _rows(figures, ("prefix_cache.hit_rate",))


def _block(variant: str, result: RunResult) -> Iterator[str]:
    figures = result.summary
    yield f"{' Serving Simulation Result ':=^{WIDTH}}"
    yield _row("Variant:", variant)
    yield _row("Engine:", f"{result.scenario.engine.name} {result.scenario.engine.variant}")
    yield from _outcomes(result)
    yield _row("Benchmark duration (s):", figures["makespan_s"])
    yield from _rows(figures, (*_COUNTS, *_RATES))
    for key, (_, title) in LATENCIES.items():
        yield f"{title:-^{WIDTH}}"
        yield from _rows(figures, (f"{key}.{name}" for name in STATISTICS))
    yield f"{OVER_ALL_TITLE:-^{WIDTH}}"
    for key in OVER_ALL.values():
        yield from _rows(figures, (f"{key}.{name}" for name in (*STATISTICS, "censored")))
    for key, title, names in _OF_SOME:
        if key in figures:
            yield f"{title:-^{WIDTH}}"
            there = [name for name in names if name.partition(".")[2] in figures[key]]
            yield from _rows(figures, there)
    yield f"{'Scheduling':-^{WIDTH}}"
    yield from _rows(figures, _SCHEDULING)
    yield from _prefix_cache(figures)
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
        show = _count if isinstance(figure(figures, key), int) else _number
        if interval := result.fidelity.of(key, show):
            yield f"  {_label(key):<32}{format_metric(figures, key, _number):>12}   {interval}"


#: Columns of the table of replicas: metric, heading, width, decimals.
_REPLICA = (
    ("requests", "requests", 9, 0),
    ("finished", "finished", 9, 0),
    ("utilisation", "busy %", 8, 1),
    ("mean_ttft_ms", "first token ms", 16, 1),
    ("preemptions", "preempted", 10, 0),
    ("hit_rate", "hits %", 8, 1),
)
#: Maximum number of replicas on the console; summary.json has all replicas.
_MOST_REPLICAS = 16


def _fleet(fleet: dict[str, Any]) -> Iterator[str]:
    """Yield lines with the metrics of the fleet and of each replica."""
    yield f"{'Fleet':-^{WIDTH}}"
    yield _row("Replicas:", fleet["replicas"])
    yield from _rows({"fleet": fleet}, FLEET_METRICS)
    yield f"{'replica':<8}" + "".join(f"{heading:>{width}}" for _, heading, width, _ in _REPLICA)
    for row in fleet["by_replica"][:_MOST_REPLICAS]:
        percent = {"utilisation": 100.0, "hit_rate": 100.0}
        cells = [
            f"{row[key] * percent.get(key, 1):>{width}.{decimals}f}"
            if row[key] or key != "mean_ttft_ms"
            else f"{'none':>{width}}"
            for key, _, width, decimals in _REPLICA
        ]
        yield f"{row['replica']:<8}" + "".join(cells)
    if (more := len(fleet["by_replica"]) - _MOST_REPLICAS) > 0:
        yield f"... and {more} more: see summary.json"


def _label(name: str) -> str:
    """Return the label of a metric; E2E latency is called E2EL, as in ``vllm bench serve``."""
    return heading(name).replace("E2E ", "E2EL ")


def _rows(figures: dict[str, Any], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield _row(f"{_label(name)}:", format_metric(figures, name, _number))


def _row(label: str, value: Any) -> str:
    return f"{label:<40}{_number(value):<10}".rstrip()


def _number(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _count(value: float) -> str:
    return f"{value:.0f}"


def _side_by_side(results: dict[str, RunResult]) -> StackedTable:
    keys = [
        key
        for key in _SIDE_BY_SIDE
        if any(figure(result.summary, key) for result in results.values())
        or key not in FAILURES
        or key == Outcome.STARVED
    ]
    figures = Column("", ["Ending", *map(_label, keys)], right=False)
    return StackedTable(
        figures,
        [
            Column(name, [humanize(result.summary["verdict"]), *(_of(result, key) for key in keys)])
            for name, result in results.items()
        ],
    )


def _of(result: RunResult, key: str) -> str:
    """Return a metric as text. A star marks latencies of finished requests only."""
    star = " *" if key.partition(".")[0] in LATENCIES and _failed(result) else ""
    return format_metric(result.summary, key, _number) + star


def _outcomes(result: RunResult) -> Iterator[str]:
    """Yield the numbers of successful, failed and cancelled requests."""
    figures = result.summary
    yield _row("Successful requests:", figures["finished"])
    yield _row("Failed requests:", _failed(result))
    failed = [outcome for outcome in FAILURES if figures[outcome]]
    yield from (_row(f"  {outcome.word}:", figures[outcome]) for outcome in failed)
    if figures["cancelled"]:
        yield _row("Cancelled requests:", figures["cancelled"])


def _failed(result: RunResult) -> int:
    figures = result.summary
    failed: int = figures["requests"] - figures["finished"] - figures["cancelled"]
    return failed


def _published(comparisons: Sequence[PublishedComparison]) -> AdaptiveTable:
    simulated = ["none" if row.simulated is None else f"{row.simulated:.2f}" for row in comparisons]
    return AdaptiveTable(
        [
            Column("variant", [row.variant for row in comparisons], right=False),
            Column("figure", [row.figure for row in comparisons], right=False),
            Column("published", [row.told for row in comparisons], 1),
            Column("simulated", simulated, 2),
            Column("error", [row.verdict for row in comparisons]),
        ]
    )


def _provenance(scenario: Scenario, results: dict[str, RunResult]) -> Iterator[str]:
    """Yield lines about given, fitted and assumed values, and about the accuracy of each cost
    profile.
    """
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
        how = describe_step_times(profile.basis, profile.fit.points, profile.fit.rms_s)
        yield f"  - {profile.name} ({profile.gpu}): {how}"


def settings_lines(results: Mapping[str, RunResult]) -> Iterator[str]:
    """Yield a line with the settings of each engine on known hardware.

    Variants with equal settings share a line. If two lines state the same settings with different
    values, the second line contains only the different values.
    """
    owners: dict[_Settings, list[str]] = {}
    for name, result in results.items():
        for place, origins in result.scenario.origins.sections.items():
            settings = _list_settings(_config(result.scenario, place), origins)
            where = [str(part) for part in place[1:-1]]  # ("fleet", "replicas", 0, "engine")
            owners.setdefault(settings, []).append(" ".join([name, *where]))
    first = next(iter(owners), None)
    for settings, names in owners.items():
        whose = "" if len(owners) == 1 else f" ({', '.join(names)})"
        if first and settings is not first and (differing := settings.without(first)):
            yield f"Settings{whose}: as {owners[first][0]}, except {differing}."
        else:
            yield f"Settings{whose}: {settings}."
    for line in dict.fromkeys(_front_end_line(result) for result in results.values()):
        if line:
            yield line


def _front_end_line(result: RunResult) -> str:
    """Return a line with the simulated costs of the API server, or "" if it is not simulated."""
    costs = find_front_end_costs(result.scenario, result.specs[0])
    if costs is None:
        return ""
    engine = result.scenario.engine
    source = "packaged values" if result.scenario.front_end is None else "given in front_end"
    count = "" if costs.processes == 1 else f", {costs.processes} processes"
    return (
        f"API server: {1e3 * costs.request_s:g} ms per request, {1e6 * costs.prompt_token_s:g} "
        f"us per prompt token, {1e6 * costs.output_token_s:g} us per output token, "
        f"{1e3 * costs.latency_s:g} ms latency{count} ({source} for {engine.name} "
        f"{engine.variant}; to simulate without it, set front_end: none)."
    )


def _config(scenario: Scenario, place: FieldPath) -> Any:
    """Return the engine configuration at a path of the scenario."""
    if place == ("engine",) or scenario.fleet is None:
        return scenario.engine
    group = scenario.fleet.groups[int(place[2])]
    return group.engine or scenario.engine


class _Settings(NamedTuple):
    """Settings of an engine as text, such as ``block_size 16``: the defaults that were chosen from
    ``source``, and the given settings.
    """

    engine: str
    source: str
    chosen: tuple[str, ...]
    given: tuple[str, ...]

    def __str__(self) -> str:
        chosen = [f"{', '.join(self.chosen)} ({self.source})"] if self.chosen else []
        given = [f"given: {', '.join(self.given)}"] if self.given else []
        return "; ".join(chosen + given) or self.engine

    def without(self, other: _Settings) -> str:
        """Return the values that are different in ``other``, or "" if ``other`` lists different
        settings.
        """

        def names(settings: _Settings) -> list[list[str]]:
            return [[one.split()[0] for one in some] for some in (settings.chosen, settings.given)]

        if (self.engine, names(self)) != (other.engine, names(other)):
            return ""
        chosen = tuple(one for one in self.chosen if one not in other.chosen)
        given = tuple(one for one in self.given if one not in other.given)
        return str(self._replace(chosen=chosen, given=given)) if chosen or given else ""


def _list_settings(config: Any, origins: EngineSettings) -> _Settings:
    # A saved scenario contains every setting. Those with their default value are not printed,
    # unless the launcher would choose another value.
    spec = find_engine_spec(config)
    chosen_at_start = {spec.memory, *spec.launch.fields}
    given = [
        name
        for name in origins.given
        if name in chosen_at_start
        or getattr(config, name) != config.__dataclass_fields__[name].default
    ]
    return _Settings(
        f"{config.name} {config.variant}",
        origins.source,
        tuple(_said(config, name) for name in origins.default),
        tuple(_said(config, name) for name in given),
    )


def _said(config: Any, name: str) -> str:
    value = getattr(config, name)
    if isinstance(value, bool):
        return f"{name} {str(value).lower()}"
    if isinstance(value, tuple):
        return f"{name} [{', '.join(map(str, value))}]"
    return f"{name} {value}"
