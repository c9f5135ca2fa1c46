"""A sweep from beginning to end: all points are checked, those not done are run, a table is made.

sweep = sweep_of(Path("scenario.yaml"), [parse_axis("engine.num_gpu_blocks=256,512")])
with bench_for(Path("points.jsonl")) as bench:
    frame = table(sweep, finish(sweep, bench))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from simkv.core.errors import InputError, nearest
from simkv.measure.simulate import check_scenario
from simkv.scenario.document import Document, read_document
from simkv.scenario.load import resolve, variant_names
from simkv.scenario.overruled import notes_on_overruled, overruling
from simkv.scenario.scenario import Scenario
from simkv.search.bench import Advance, Bench
from simkv.search.jobs import Job, RunsFailed, Summary, job_of
from simkv.search.knobs import MOST_POINTS, VARIANTS, Axis, Knobs, assignment, grid
from simkv.search.seeds import nothing_drawn, repeated, seed_of
from simkv.search.sweep.sample import Sample, draw

#: So many errors are shown; a mistake in one place may show at every point.
MOST_ERRORS = 50


@dataclass(frozen=True)
class SweepRun:
    """One row of the table: the number of its point, knobs, variant, which repeat, and the job.

    ``own`` are those of the knobs that the variant sets itself, as it does.
    """

    point: int
    knobs: Knobs
    variant: str
    repeat: int
    job: Job
    own: Knobs

    @property
    def seed(self) -> int | None:
        """The seed of its workload, if that draws anything by chance."""
        return seed_of(self.job.scenario.workload)


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep, in the order of the table. ``knobs`` are the paths of the axes.

    ``notes`` say which of what is set does not reach a variant.
    """

    name: str
    knobs: tuple[str, ...]
    runs: tuple[SweepRun, ...]
    notes: tuple[str, ...] = ()

    @property
    def idle_knobs(self) -> list[str]:
        """Knobs that change nothing, whatever the others are, as far as the sweep can tell."""
        return [knob for knob in self.knobs if self._is_idle(knob)]

    def _is_idle(self, knob: str) -> bool:
        digests: dict[object, list[str]] = {}
        for run in self.runs:
            others = [setting for setting in run.knobs.items() if setting[0] != knob]
            key = (repr(others), run.variant, run.repeat)
            digests.setdefault(key, []).append(run.job.digest)
        alone = all(len(group) == 1 for group in digests.values())
        return not alone and all(len(set(group)) == 1 for group in digests.values())


def sweep_of(
    path: Path,
    axes: Sequence[Axis],
    overrides: Sequence[str] = (),
    sample: Sample | None = None,
    seed: int = 0,
    repeats: int = 1,
) -> Sweep:
    """Every run of a sweep over ``axes``, checked as far as that goes without running it.

    ``overrides`` apply to all points, before the axes. Without a ``sample`` all combinations are
    run. Every point is run with each variant, or with those of the axis ``variants``; ``repeats``
    times where its workload is drawn by chance. Raises one InputError with all that is wrong.
    """
    document = read_document(path)

    def scenarios(knobs: Knobs) -> dict[str, Scenario]:
        given = [assignment(*knob) for knob in knobs.items()]
        return resolve(Document(path, copy(document.tree)), overrides, given)

    variants = _variants(variant_names(Document(path, copy(document.tree)), overrides), axes)
    knobs = [axis for axis in axes if axis.path != VARIANTS]
    _check_paths(axes)
    points = draw(knobs, sample, seed) if sample else grid(knobs)
    if len(points) * len(variants) * repeats > MOST_POINTS:
        count = len(points) * len(variants) * repeats
        raise InputError(
            f"--over: {count:,} runs, with all variants and repeats; at most {MOST_POINTS:,}"
        )
    own = _own(document, [axis.path for axis in knobs])
    runs: list[SweepRun] = []
    errors: dict[str, list[Knobs]] = {}
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
                for repeat in range(repeats if seed_of(scenario.workload) is not None else 1):
                    job = job_of(repeated(scenario, repeat), path.parent.resolve())
                    runs.append(SweepRun(number, point, variant, repeat, job, own.get(variant, {})))
        except InputError as error:
            for line in str(error).splitlines():
                errors.setdefault(line, []).append(point)
    _report(errors, len(points))
    if repeats > 1 and all(run.seed is None for run in runs):
        raise nothing_drawn(repeats)
    notes = [
        *notes_on_overruled(document, overrides),
        *notes_on_overruled(document, [axis.path for axis in knobs], "--over"),
    ]
    name = runs[0].job.scenario.name
    return Sweep(name, tuple(axis.path for axis in knobs), tuple(runs), tuple(notes))


def _own(document: Document, paths: Sequence[str]) -> dict[str, Knobs]:
    """By variant, the knobs at ``paths`` that it sets itself."""
    own: dict[str, Knobs] = {}
    for path in paths:
        for variant, value in overruling(document, path).items():
            own.setdefault(variant, {})[path] = value
    return own


def _variants(known: Sequence[str], axes: Sequence[Axis]) -> list[str]:
    """The variants to run. Raises InputError for a name that is not one."""
    wanted = [str(value) for axis in axes if axis.path == VARIANTS for value in axis.values]
    for name in wanted:
        if name not in known:
            raise InputError(
                f"--over {VARIANTS}={name}: there is no such variant{nearest(name, known)}; "
                f"expected one of {', '.join(known)}"
            )
    return wanted or list(known)


def _check_paths(axes: Sequence[Axis]) -> None:
    paths = [axis.path for axis in axes]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"--over {path}: given twice; expected all its values in one list")


def _report(errors: Mapping[str, Sequence[Knobs]], points: int) -> None:
    """Raise InputError with every error once, and at how many points it is."""
    if not errors:
        return
    lines = [
        f"{line} (at {len(at)} of {points} points, first {_shown(at[0])})" if points > 1 else line
        for line, at in list(errors.items())[:MOST_ERRORS]
    ]
    if len(errors) > MOST_ERRORS:
        lines.append(f"and {len(errors) - MOST_ERRORS:,} more")
    raise InputError("\n".join(lines))


def _shown(knobs: Knobs) -> str:
    return ", ".join(assignment(*knob) for knob in knobs.items())


def finish(sweep: Sweep, bench: Bench, advance: Advance | None = None) -> dict[str, Summary]:
    """Run what has not been done yet; returns the summary of every job of the sweep by digest.

    Settings that come to the same are run once. Raises RunsFailed at the end if some could not be.
    """
    failed = bench.run([run.job for run in sweep.runs], advance)
    if failed:
        raise RunsFailed(_failures(sweep, failed))
    return {run.job.digest: bench.done[run.job.digest] for run in sweep.runs}


def _failures(sweep: Sweep, failed: Mapping[str, Exception]) -> str:
    """The first point of every different error, and how many have it."""
    by_error: dict[str, list[SweepRun]] = {}
    for run in sweep.runs:
        if run.job.digest in failed:
            by_error.setdefault(str(failed[run.job.digest]), []).append(run)
    return "\n".join(
        f"{len(runs)} of {len(sweep.runs)} runs failed, the first with {runs[0].variant}"
        f"{', ' if runs[0].knobs else ''}{_shown(runs[0].knobs)}, "
        f"repeat {runs[0].repeat}: {error}"
        for error, runs in by_error.items()
    )
