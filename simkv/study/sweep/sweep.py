"""Build and run a sweep: check all combinations of settings, and run those without stored results.

Example:

    sweep = build_sweep(Path("scenario.yaml"), [parse_axis("engine.num_gpu_blocks=256,512")])
    with open_pooled_runner(Path("points.jsonl")) as runner:
        frame = build_sweep_table(sweep, run_sweep(sweep, runner))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from simkv.core.errors import InputError, spelling_hint
from simkv.metrics.scenario_runner import check_scenario
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import resolve_variants, variant_names
from simkv.scenario.variant_precedence import find_overriding_variants, override_notes
from simkv.scenario.yaml_document import YamlDocument, read_document
from simkv.study.job_runner import JobRunner, ProgressCallback
from simkv.study.random_seeds import find_seed, make_unseeded_error, reseed_scenario
from simkv.study.simulation_job import (
    RunsFailed,
    SimulationJob,
    Summary,
    make_job,
)
from simkv.study.sweep_axes import (
    MAX_POINTS,
    VARIANTS_AXIS,
    Axis,
    KnobSettings,
    SampleSpec,
    format_assignment,
    grid,
    sample_points,
)

#: Maximum number of errors in a message, because one mistake may cause an error for every run.
MAX_SHOWN_ERRORS = 50


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep.

    ``knobs`` is the combination of settings, and ``point`` is its number. ``variant_knobs``
    contains the settings of the variant itself.
    """

    point: int
    knobs: KnobSettings
    variant: str
    repeat: int
    job: SimulationJob
    variant_knobs: KnobSettings

    @property
    def seed(self) -> int | None:
        """Seed of the workload, or None if nothing in it is random."""
        return find_seed(self.job.scenario.workload)


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, in the order of the table. ``knobs`` are the paths of the settings.

    ``notes`` report settings that do not apply to a variant.
    """

    name: str
    knobs: tuple[str, ...]
    runs: tuple[SweepRun, ...]
    notes: tuple[str, ...] = ()

    @property
    def idle_knobs(self) -> list[str]:
        """Settings without an effect: runs that differ only in such a setting have equal
        results.
        """
        return [knob for knob in self.knobs if self._is_idle(knob)]

    def _is_idle(self, knob: str) -> bool:
        digests: dict[object, list[str]] = {}
        for run in self.runs:
            others = [setting for setting in run.knobs.items() if setting[0] != knob]
            key = (repr(others), run.variant, run.repeat)
            digests.setdefault(key, []).append(run.job.digest)
        alone = all(len(group) == 1 for group in digests.values())
        return not alone and all(len(set(group)) == 1 for group in digests.values())


def build_sweep(
    path: Path,
    axes: Sequence[Axis],
    overrides: Sequence[str] = (),
    sample: SampleSpec | None = None,
    seed: int = 0,
    repeats: int = 1,
) -> Sweep:
    """Build and check all runs of a sweep over ``axes`` without running them.

    ``overrides`` apply to all runs; values of ``axes`` override them. Without a ``sample``, all
    combinations are included. A random workload is run ``repeats`` times. Raises one InputError
    with all errors.
    """
    document = read_document(path)

    def scenarios(knobs: KnobSettings) -> dict[str, Scenario]:
        given = [format_assignment(*knob) for knob in knobs.items()]
        return resolve_variants(YamlDocument(path, copy(document.tree)), overrides, given)

    variants = _variants(variant_names(YamlDocument(path, copy(document.tree)), overrides), axes)
    knobs = [axis for axis in axes if axis.path != VARIANTS_AXIS]
    _check_paths(axes)
    points = sample_points(knobs, sample, seed) if sample else grid(knobs)
    if len(points) * len(variants) * repeats > MAX_POINTS:
        count = len(points) * len(variants) * repeats
        raise InputError(
            f"--over: this sweep has {count:,} runs, counting all variants and repeats; "
            f"expected at most {MAX_POINTS:,}"
        )
    own = _own(document, [axis.path for axis in knobs])
    runs: list[SweepRun] = []
    errors: dict[str, list[KnobSettings]] = {}
    checked: set[str] = set()
    for number, point in enumerate(points):
        try:
            found = scenarios(point)
            for variant in variants:
                scenario = found[variant]
                workload = f"{scenario.workload!r} {scenario.timeout}"
                if workload not in checked:
                    check_scenario(scenario, path.parent)
                    checked.add(workload)
                for repeat in range(repeats if find_seed(scenario.workload) is not None else 1):
                    job = make_job(reseed_scenario(scenario, repeat), path.parent.resolve())
                    runs.append(SweepRun(number, point, variant, repeat, job, own.get(variant, {})))
        except InputError as error:
            for line in str(error).splitlines():
                errors.setdefault(line, []).append(point)
    _report(errors, len(points))
    if repeats > 1 and all(run.seed is None for run in runs):
        raise make_unseeded_error(repeats)
    notes = [
        *override_notes(document, overrides),
        *override_notes(document, [axis.path for axis in knobs], "--over"),
    ]
    name = runs[0].job.scenario.name
    return Sweep(name, tuple(axis.path for axis in knobs), tuple(runs), tuple(notes))


def _own(document: YamlDocument, paths: Sequence[str]) -> dict[str, KnobSettings]:
    """Return the values that each variant defines for settings at ``paths``."""
    own: dict[str, KnobSettings] = {}
    for path in paths:
        for variant, value in find_overriding_variants(document, path).items():
            own.setdefault(variant, {})[path] = value
    return own


def _variants(known: Sequence[str], axes: Sequence[Axis]) -> list[str]:
    """Return the names of the variants to run. Raises InputError for an unknown name."""
    wanted = [str(value) for axis in axes if axis.path == VARIANTS_AXIS for value in axis.values]
    for name in wanted:
        if name not in known:
            raise InputError(
                f"--over {VARIANTS_AXIS}={name}: unknown variant{spelling_hint(name, known)}; "
                f"expected one of {', '.join(known)}"
            )
    return wanted or list(known)


def _check_paths(axes: Sequence[Axis]) -> None:
    paths = [axis.path for axis in axes]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(
                f"--over {path}: this setting is specified twice; list all values in one --over"
            )


def _report(errors: Mapping[str, Sequence[KnobSettings]], points: int) -> None:
    """Raise InputError with each distinct error and the number of affected combinations."""
    if not errors:
        return
    lines = [
        f"{line} (at {len(at)} of {points} points, first {_shown(at[0])})" if points > 1 else line
        for line, at in list(errors.items())[:MAX_SHOWN_ERRORS]
    ]
    if len(errors) > MAX_SHOWN_ERRORS:
        lines.append(f"and {len(errors) - MAX_SHOWN_ERRORS:,} more")
    raise InputError("\n".join(lines))


def _shown(knobs: KnobSettings) -> str:
    return ", ".join(format_assignment(*knob) for knob in knobs.items())


def run_sweep(
    sweep: Sweep, runner: JobRunner, advance: ProgressCallback | None = None
) -> dict[str, Summary]:
    """Run the jobs without a stored result, and return the summaries of all jobs by digest.

    Raises RunsFailed at the end if some runs failed.
    """
    failed = runner.run([run.job for run in sweep.runs], advance)
    if failed:
        raise RunsFailed(_failures(sweep, failed))
    return {run.job.digest: runner.done[run.job.digest] for run in sweep.runs}


def _failures(sweep: Sweep, failed: Mapping[str, Exception]) -> str:
    """Return a line for each distinct error, with the number of affected runs and the first of
    them.
    """
    by_error: dict[str, list[SweepRun]] = {}
    for run in sweep.runs:
        if run.job.digest in failed:
            by_error.setdefault(str(failed[run.job.digest]), []).append(run)
    return "\n".join(
        f"{len(runs)} of {len(sweep.runs)} runs failed, first with {runs[0].variant}"
        f"{', ' if runs[0].knobs else ''}{_shown(runs[0].knobs)}, "
        f"repeat {runs[0].repeat}: {error}"
        for error, runs in by_error.items()
    )
