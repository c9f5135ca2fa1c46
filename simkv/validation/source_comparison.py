"""Compare simkv's model of a release with an engine's own code, on the packaged incidents (the
"zoo").

Each variant of an incident is simulated twice with the same workload and settings: with the model
of a release (by default the newest), and with the engine's code in a source (a checkout or a
wheel).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import RenderableType

from simkv.core.errors import InputError
from simkv.core.figure_registry import METRICS
from simkv.metrics.expectation_checks import SERVED_VERDICTS, ExpectationCheck
from simkv.native.native_engines import NATIVE_ENGINES
from simkv.native.native_source import SourceError, find_source, locate
from simkv.report.adaptive_table import AdaptiveTable, Column
from simkv.scenario.packaged_scenarios import PackagedIncident
from simkv.scenario.run_fields import run_fields
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import resolve_variants, select_variant
from simkv.scenario.yaml_document import read_document
from simkv.study.change_check import FIGURES
from simkv.study.field_changes import with_field
from simkv.study.job_runner import open_pooled_runner
from simkv.study.simulation_job import SimulationJob
from simkv.study.whatif.trial_evaluation import RunFigures, make_trial_job, parse_run_figures

#: Metrics that are compared.
COMPARED = (*FIGURES, "preemptions", "recomputed_tokens")
#: Function that loads a variant of an incident with the code of the source.
LoadVariant = Callable[[PackagedIncident, str], Scenario]
Judgement = Literal["better", "worse", "mixed", "unchanged", "not run"]


@dataclass(frozen=True)
class FigureDifference:
    """Two values of a metric: with simkv's model of a release (``before``), and with the engine's
    code.

    A value is NaN if the run has no such metric.
    """

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative change from the first to the second value, or infinity if only the first value
        is 0.
        """
        if self.before == self.after:
            return 0.0
        return (self.after - self.before) / abs(self.before) if self.before else inf

    @property
    def is_worse(self) -> bool:
        return (self.after < self.before) == METRICS[self.name].more_is_better


@dataclass(frozen=True)
class SourceComparison:
    """Results of one variant of an incident, run with simkv's model of a release and with the
    engine's own code.

    ``differences`` are metrics whose change exceeds the tolerance. ``refused`` is the reason for a
    missing result.
    """

    incident: str
    variant: str
    before: RunFigures | None
    after: RunFigures | None
    differences: tuple[FigureDifference, ...] = ()
    refused: str = ""

    @property
    def is_regression(self) -> bool:
        """Whether all requests were served with the release but not with the engine's own code."""
        if self.before is None or self.after is None:
            return False
        return self.before.verdict in SERVED_VERDICTS and self.after.verdict not in SERVED_VERDICTS

    @property
    def judgement(self) -> Judgement:
        """Result of the comparison: better, worse, mixed, unchanged or not run."""
        if self.before is None or self.after is None:
            return "not run"
        served = [one.verdict in SERVED_VERDICTS for one in (self.before, self.after)]
        if served[0] != served[1]:
            return "better" if served[1] else "worse"
        worse = {one.is_worse for one in self.differences}
        if not worse:
            return "unchanged"
        return "mixed" if len(worse) > 1 else "worse" if True in worse else "better"

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as a dictionary for JSON."""
        return {
            "incident": self.incident,
            "variant": self.variant,
            "judgement": self.judgement,
            "newest_release": self.before and self.before.verdict,
            "source": self.after and self.after.verdict,
            "not_run": self.refused or None,
            "metrics": {one.name: [one.before, one.after] for one in self.differences},
        }

    def as_check(self) -> ExpectationCheck:
        """Return the comparison as a check, which fails if only the release serves all requests."""
        found = self.after.summary if self.after else f"not run: {self.refused}"
        expected = f"verdict as in the newest release ({self.before and self.before.summary})"
        return ExpectationCheck(self.variant, "source", expected, found, not self.is_regression)


def compare_incidents(
    incidents: Sequence[PackagedIncident],
    load_on_source: LoadVariant,
    tolerance: float,
    jobs: int | None = 1,
    advance: Callable[[int, int], None] | None = None,
    release: str | None = None,
) -> list[SourceComparison]:
    """Compare each variant of ``incidents``. All must use the engine whose code is compared.

    ``jobs`` is the maximum number of processes, by default one per core. ``advance`` is called with
    the number of finished runs and the total number of runs. ``release`` is the compared release,
    by default the newest.
    """
    pairs: list[tuple[PackagedIncident, str, SimulationJob | str, SimulationJob | str]] = []
    for incident in incidents:
        seen: list[dict[str, Any]] = []
        for name, scenario in incident.variants.items():
            folder = incident.path.parent
            before, after = (
                _job(lambda: _with_release(scenario, release, folder), folder),  # noqa: B023
                _job(lambda: load_on_source(incident, name), folder),  # noqa: B023
            )
            if isinstance(before, SimulationJob):
                if (fields := run_fields(before.scenario)) in seen:
                    continue
                seen.append(fields)
            pairs.append((incident, name, before, after))
    with open_pooled_runner(None, jobs) as runner:
        whole = [job for *_, a, b in pairs for job in (a, b) if isinstance(job, SimulationJob)]
        failed = runner.run(whole, advance)
        done = runner.done

    def result(job: SimulationJob | str) -> RunFigures | str:
        if isinstance(job, str):
            return job
        error = failed.get(job.digest)
        return str(error) if error else parse_run_figures(done[job.digest])

    return [
        _compared(incident.name, name, result(before), result(after), tolerance)
        for incident, name, before, after in pairs
    ]


def _job(load: Callable[[], Scenario], folder: Path) -> SimulationJob | str:
    """Return the job that runs a scenario, or the reason why the scenario cannot be loaded."""
    try:
        return make_trial_job(load(), folder)
    except InputError as error:
        return str(error)


def _compared(
    incident: str, name: str, before: RunFigures | str, after: RunFigures | str, tolerance: float
) -> SourceComparison:
    if isinstance(before, str):
        return SourceComparison(incident, name, None, None, refused=before)
    if isinstance(after, str):
        return SourceComparison(incident, name, before, None, refused=after)
    found = _differences(before, after, tolerance)
    return SourceComparison(incident, name, before, after, found)


def find_source_engine(source: str) -> str:
    """Return the name of the engine whose code is in ``source``.

    Raises InputError if ``source`` contains no engine.
    """
    for name in NATIVE_ENGINES:
        try:
            locate(name, source)
        except SourceError as error:
            if not Path(source).exists():
                raise InputError(f"--{error}") from None
        else:
            return name
    packages = " or ".join(f"{spec.package}/" for spec in NATIVE_ENGINES.values())
    raise InputError(
        f"--source {source}: contains no {packages}; expected a checkout, a wheel or an unpacked "
        "wheel"
    )


def find_release(engine: str, source: str) -> str:
    """Return the modelled release nearest to the version of the code in ``source``."""
    version = find_source(engine, source, Path()).version
    return NATIVE_ENGINES[engine].variant_of(version)


def load_from(source: str) -> LoadVariant:
    """Return a function that loads a variant of an incident with the code in ``source``.

    The function raises InputError if the code does not support a setting of the variant.
    """

    def load(incident: PackagedIncident, variant: str) -> Scenario:
        document = read_document(incident.path)
        select_variant(document, variant)
        document.override(f"engine.source={json.dumps(source)}", "--source")
        return resolve_variants(document)[variant]

    return load


def _with_release(scenario: Scenario, release: str | None, folder: Path) -> Scenario:
    variant = release or type(scenario.engine)().variant
    return with_field(scenario, "engine.variant", variant, folder)


def _differences(
    before: RunFigures, after: RunFigures, tolerance: float
) -> tuple[FigureDifference, ...]:
    found = (FigureDifference(name, before[name], after[name]) for name in COMPARED)
    return tuple(
        one
        for one in found
        if not (isnan(one.before) and isnan(one.after)) and not abs(one.change) <= tolerance
    )


#: Maximum number of metrics in a cell of the table, the largest changes first.
_LISTED = 3


def render_comparisons(
    rows: Sequence[SourceComparison], release: str | None = None
) -> Iterator[RenderableType]:
    """Yield the table of the comparisons, the reasons for missing results, and a summary.

    ``release`` is the compared release, or None for the newest.
    """
    port = f"port of {release}" if release else "newest release"
    ran = [row for row in rows if row.before and row.after]
    yield AdaptiveTable(
        [
            Column("Incident", [row.incident for row in ran], right=False),
            Column("Variant", [row.variant for row in ran], right=False),
            Column(port.capitalize(), [_verdict(row.before) for row in ran], right=False),
            Column("Source", [_verdict(row.after) for row in ran], right=False),
            Column("Result", [row.judgement for row in ran], right=False),
            Column("Changed metrics", [_changed(row) for row in ran], 1, right=False),
        ],
        frozenset(i for i, row in enumerate(ran) if row.judgement != "unchanged"),
    )
    for row in rows:
        if row.refused:
            yield f"{row.incident}, {row.variant}: not run: {row.refused}"
    counts = Counter(row.judgement for row in rows)
    yield ", ".join(f"{counts[word]} {word}" for word in get_args(Judgement) if counts[word])
    for row in rows:
        if row.is_regression and row.after:
            yield (
                f"REGRESSION: {row.incident}, {row.variant}: served by the {port}, "
                f"{row.after.summary} on the source"
            )


def _verdict(run: RunFigures | None) -> str:
    if run is None:
        return ""
    finished = run["finished"]
    return f"{run.verdict}, {finished:.0f} finished" if run.verdict != "served" else "served"


def _changed(row: SourceComparison) -> str:
    """Return the largest differences. A mixed row has at least one better and one worse metric."""
    ranked = sorted(row.differences, key=lambda one: -abs(one.change))
    largest, further = ranked[:_LISTED], ranked[_LISTED:]
    if len({one.is_worse for one in largest}) == 1:
        largest += [one for one in further if one.is_worse != largest[0].is_worse][:1]
    cells = []
    for one in largest:
        metric = METRICS[one.name]
        values = (
            "none" if isnan(value) else metric.format(value) for value in (one.before, one.after)
        )
        better = " (better)" if row.judgement == "mixed" and not one.is_worse else ""
        cells.append(f"{metric.label} {' → '.join(values)}{better}")
    return "\n".join(cells)
