"""Search for engine flags that would have prevented the incident: a what-if analysis of settings.

Only changes that an operator can make are tried. A remedy is a change that helps. Remedies with a
certain benefit rank first. Among equal numbers of finished requests, remedies that make the slowest
requests much slower rank last. Remedies with a similar benefit rank in this order: a setting that
returns to its default, a setting that is switched, a changed number, another version of the engine,
and a larger cache, which needs other hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from simkv.core.engine_flags import Env, Flag, sources
from simkv.core.engine_version import find_version
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile
from simkv.costs.profile_uncertainty import compute_profile_scales
from simkv.costs.scaled_executor import ErrorSide, StepKind
from simkv.incident.effect_size import (
    EffectSize,
    SideEffects,
    measure_effect,
    measure_side_effects,
)
from simkv.incident.observed_comparison import MEAN_TOLERANCE
from simkv.incident.trial_bounds import Bounds
from simkv.scenario.scenario import Scenario, StepScale
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.field_changes import with_knobs
from simkv.study.simulation_job import SimulationJob
from simkv.study.whatif.candidate_changes import Change, apply_change
from simkv.study.whatif.trial_evaluation import Evaluator, RunFigures, make_trial_job
from simkv.study.whatif.whatif import Effect, evaluate_change, run_whatif

#: Maximum ratio of mean E2E latencies of remedies that count as similarly good.
NEAR_BEST_RATIO = 1.1
#: Maximum increase of the p99 E2E latency; a remedy above it only shifts the wait to a few
#: requests.
MAX_TAIL_RATIO = 1.25
#: A remedy is minor if it decreases the mean E2E latency by less than this fraction of the largest
#: decrease, provided that the largest decrease is at least ``MIN_GAIN`` of the mean E2E latency.
MINOR_GAIN_SHARE, MIN_GAIN = 1 / 3, 0.1
#: Number of releases before the server's release that are tried.
OLDER_RELEASES = 2
#: Number of remedies whose effect size is measured.
MEASURED_REMEDIES = 10
#: Fractions of the profile's error to try until a scenario reproduces the incident.
ERROR_SHARES = (1.0, 0.5, 0.25, 0.1)
RemedyKind = Literal["flag", "version", "memory"]


@dataclass(frozen=True)
class Remedy:
    """A change that helps: another value of a flag, another version or another cache size.

    ``typed`` is the flag on the command line, or the version to install. ``cost`` describes the
    side effects on other requests. ``gain`` is the effect size, or None if not measured.
    """

    effect: Effect
    means: RemedyKind
    typed: str
    to_default: bool
    cost: SideEffects
    gain: EffectSize | None = None

    @property
    def sure(self) -> bool:
        """Whether the whole interval of the effect is an improvement."""
        return self.gain is None or self.gain.sure


@dataclass(frozen=True)
class RemedySearch:
    """Result of the search: the run without a change (``base``), and the changes that help, best
    first.

    ``tried`` is the number of changes that were tried. ``cut_off`` is the number of trials that
    ended before all requests finished. ``skipped`` lists the values of limits that were not tried,
    because less strict values decreased the number of served requests twice in a row.
    """

    base: RunFigures
    remedies: tuple[Remedy, ...]
    tried: int
    bounds: Bounds
    cut_off: int
    skipped: tuple[Change, ...]

    def of(self, means: RemedyKind) -> list[Remedy]:
        """Return the remedies of one kind: flags, versions or cache sizes."""
        return [remedy for remedy in self.remedies if remedy.means == means]


def find_remedies(
    scenario: Scenario,
    evaluator: Evaluator,
    bounds: Bounds,
    worlds: Sequence[Sequence[Scenario]] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> RemedySearch:
    """Try every flag, and rank the changes that prevent or reduce the problem.

    ``worlds`` contains lists of alternative scenarios that may describe the incident. Each list
    begins with the largest deviation.
    """
    folder = evaluator.folder
    tried = bounds.tried(scenario, folder)
    found = run_whatif(
        tried,
        evaluator,
        tell=tell,
        also=_to_defaults(tried, folder),
        wanted=lambda change: _is_tried(scenario, change),
    )
    base, effects = found.base, list(found.effects)
    cut_off = sum(_is_cut_off(effect) for effect in effects)
    ranked = _ranked(_helpful(scenario, base, effects), base)
    if bounds.part is not None and bounds.finalists:
        base, effects = _on_all(bounds.whole(scenario), ranked[: bounds.finalists], evaluator)
        ranked = _ranked(_helpful(scenario, base, effects), base)
    tried_in = bounds.whole if bounds.finalists else lambda one: bounds.tried(one, folder)
    bounded = [[tried_in(one) for one in degrees] for degrees in worlds if ranked]
    possible = _possible(bounded, base, evaluator)
    best = _with_gains(ranked[:MEASURED_REMEDIES], base, possible, evaluator)
    remedies = (*_ranked(best, base), *ranked[MEASURED_REMEDIES:])
    return RemedySearch(base, remedies, len(found.effects), bounds, cut_off, found.skipped)


def scenarios_within_error(scenario: Scenario, profile: CostProfile) -> list[list[Scenario]]:
    """Return a list of scenarios with faster steps and a list of scenarios with slower steps.

    Each list begins with the whole error of the profile, and continues with smaller fractions of
    the error.
    """
    sides: tuple[ErrorSide, ...] = ("faster", "slower")
    return [
        [_scaled(scenario, compute_profile_scales(profile, side), part) for part in ERROR_SHARES]
        for side in sides
    ]


def _scaled(scenario: Scenario, factors: Mapping[StepKind, float], part: float) -> Scenario:
    own = scenario.step_scale or StepScale()
    scales: dict[str, float] = {
        kind: getattr(own, kind) * (1 + part * (f - 1)) for kind, f in factors.items()
    }
    return scenario.model_copy(update={"step_scale": own.model_copy(update=scales)})


def _like(base: RunFigures, other: RunFigures) -> bool:
    """Return whether a run matches the incident within the tolerances."""
    lost = abs(other["finished"] - base["finished"])
    if lost > MEAN_TOLERANCE * base["requests"]:
        return False
    if not base["finished"] or not other["finished"]:
        return base["finished"] == other["finished"]
    return abs(other["e2e_ms.mean"] - base["e2e_ms.mean"]) <= MEAN_TOLERANCE * base["e2e_ms.mean"]


def _possible(
    worlds: Iterable[Sequence[Scenario]], base: RunFigures, evaluator: Evaluator
) -> list[Scenario]:
    """Return the scenario with the largest deviation that reproduces the incident, from each list.

    A scenario without alternatives is always returned.
    """
    found = []
    for degrees in worlds:
        for one in degrees:
            run = evaluator.evaluate(make_trial_job(one, evaluator.folder))
            if len(degrees) == 1 or _like(base, run):
                found.append(one)
                break
    return found


def _helpful(scenario: Scenario, base: RunFigures, effects: Iterable[Effect]) -> list[Remedy]:
    good = [e for e in effects if e.judgement in ("fixes", "helps")]
    found = [_remedy(scenario, base, e) for e in good if not shortens_answers(e, base)]
    return [remedy for remedy in found if remedy is not None]


def shortens_answers(effect: Effect, base: RunFigures) -> bool:
    """Return whether a change helps only because it shortens the answers of requests."""
    fewer = effect.figures["total_output_tokens"] < base["total_output_tokens"]
    return fewer and effect.figures["finished"] == base["finished"]


def _is_cut_off(effect: Effect) -> bool:
    return effect.figures["cut_off"] > 0


def _on_all(
    whole: Scenario, finalists: Sequence[Remedy], evaluator: Evaluator
) -> tuple[RunFigures, list[Effect]]:
    """Simulate the best changes on the whole incident instead of its worst part."""
    tried = [remedy.effect.change for remedy in finalists]
    base, *figures = evaluator.evaluate_all(_jobs(whole, tried, evaluator))
    return base, [evaluate_change(c, base, f) for c, f in zip(tried, figures, strict=True)]


def _jobs(scenario: Scenario, tried: Iterable[Change], evaluator: Evaluator) -> list[SimulationJob]:
    """Return the simulations to run: one of the unchanged scenario, and one for each change."""
    folder = evaluator.folder
    others = [apply_change(scenario, folder, change) for change in tried]
    return [make_trial_job(one, folder) for one in (scenario, *others)]


def _with_gains(
    remedies: Sequence[Remedy], base: RunFigures, worlds: Sequence[Scenario], evaluator: Evaluator
) -> list[Remedy]:
    tried = [remedy.effect.change for remedy in remedies]
    jobs = [_jobs(world, tried, evaluator) for world in worlds] if remedies else []
    evaluator.evaluate_all(job for row in jobs for job in row)
    rows = [[evaluator.evaluate(job) for job in row] for row in jobs]
    return [
        replace(
            remedy, gain=measure_effect(remedy.effect, base, [(row[0], row[place]) for row in rows])
        )
        for place, remedy in enumerate(remedies, start=1)
    ]


def _to_defaults(scenario: Scenario, folder: Path) -> Iterator[tuple[Change, SimulationJob]]:
    """Yield changes that reset a setting, other than a size, to the engine's default value."""
    spec = find_engine_spec(scenario.engine)
    for one in fields(spec.config):
        value = getattr(scenario.engine, one.name)
        kept = one.name in ("name", "variant", spec.memory, spec.longest, spec.block)
        # for None, the toggle already generates this change
        if kept or one.default is None or value == one.default:
            continue
        try:
            changed = with_knobs(scenario, folder, **{one.name: one.default})
            yield Change("knob", one.name, value, one.default), make_trial_job(changed, folder)
        except InputError:
            continue


def _remedy(scenario: Scenario, base: RunFigures, effect: Effect) -> Remedy | None:
    """Return a change as a remedy, or None if an operator cannot make the change."""
    change, typed = effect.change, _as_typed(scenario, effect.change)
    if typed is None:
        return None
    paid = measure_side_effects(effect, base)
    if change.kind == "variant":
        return Remedy(effect, "version", typed, False, paid)
    configs = fields(find_engine_spec(scenario.engine).config)
    default = next(one.default for one in configs if one.name == change.field)
    means: RemedyKind = "memory" if change.kind == "memory" else "flag"
    return Remedy(effect, means, typed, change.after == default, paid)


def _is_tried(scenario: Scenario, change: Change) -> bool:
    """Return whether an operator can make a change, and would not return to a much older release.

    All later releases are tried, but only ``OLDER_RELEASES`` earlier releases.
    """
    if change.kind == "variant" and (current := find_version(change.before)):
        names = find_engine_spec(scenario.engine).distinct_variants
        versions = {version for name in names if (version := find_version(name))}
        older = sorted(version for version in versions if version < current)
        if (version := find_version(change.after)) and version in older[:-OLDER_RELEASES]:
            return False
    return _as_typed(scenario, change) is not None


def _as_typed(scenario: Scenario, change: Change) -> str | None:
    """Return a change as an operator types it, or None if an operator cannot make the change."""
    spec = find_engine_spec(scenario.engine)
    if change.kind == "rule":
        return None
    if change.kind == "variant":
        return f"{spec.name} {change.after}"
    source = sources(spec.config).get(change.field)
    if isinstance(source, Env):
        return f"{source.name}={change.after}"
    if not isinstance(source, Flag):
        return None
    return source.to_argument(change.field, change.after, negatable=spec.has_negatable_flags)


def lengthens_tail(effect: Effect, base: RunFigures) -> bool:
    """Return whether a change makes the slowest requests much slower (p99 E2E).

    Only requests that finish with and without the change are compared.
    """
    after = {ending.id: ending.e2e_s for ending in effect.figures.endings}
    both = [
        (ending.e2e_s, late)
        for ending in base.endings
        if ending.e2e_s is not None and (late := after.get(ending.id)) is not None
    ]
    if not both:
        return False
    before_s, after_s = np.percentile(np.array(both), 99, axis=0)
    return bool(after_s > MAX_TAIL_RATIO * before_s)


def _ranked(remedies: list[Remedy], base: RunFigures) -> list[Remedy]:
    """Return the remedies, the best first.

    The criteria are: a certain benefit, the number of finished requests, the slowest requests, the
    size of the gain, whether the problem is fixed completely, and whether the cache size changes.
    Equal remedies are sorted by ``_by_e2e``.
    """
    most = max((mean_gain(one, base) for one in remedies if one.sure), default=0.0)
    groups: dict[tuple[bool, float, bool, bool, bool, bool], list[Remedy]] = {}
    for remedy in remedies:
        effect = remedy.effect
        group = (
            not remedy.sure,
            -effect.figures["finished"],
            lengthens_tail(effect, base),
            is_minor(remedy, most, base),
            effect.judgement != "fixes",
            remedy.means == "memory",
        )
        groups.setdefault(group, []).append(remedy)
    return [remedy for group in sorted(groups) for remedy in _by_e2e(groups[group])]


def mean_gain(remedy: Remedy, base: RunFigures) -> float:
    """Return the decrease of the mean E2E latency in ms, or 0 if the number of finished requests
    changes.
    """
    if not base["finished"] or remedy.effect.figures["finished"] != base["finished"]:
        return 0.0
    return base["e2e_ms.mean"] - _mean_e2e(remedy)


def is_minor(remedy: Remedy, most: float, base: RunFigures) -> bool:
    """Return whether a remedy is far less effective than the best remedy.

    ``most`` is the largest decrease of the mean E2E latency in ms. A remedy is never minor if more
    requests finish, or if it prevents a third of the preemptions.
    """
    if remedy.effect.figures["preemptions"] < (1 - MINOR_GAIN_SHARE) * base["preemptions"]:
        return False
    if not base["finished"] or remedy.effect.figures["finished"] != base["finished"]:
        return False
    known = most > MIN_GAIN * base["e2e_ms.mean"]
    return known and mean_gain(remedy, base) < MINOR_GAIN_SHARE * most


def _mean_e2e(remedy: Remedy) -> float:
    """Return the mean E2E of finished requests in ms, or 0 if none finished."""
    figures = remedy.effect.figures
    return figures["e2e_ms.mean"] if figures["finished"] else 0.0


def _by_e2e(remedies: list[Remedy]) -> list[Remedy]:
    """Return the remedies with nearly the shortest E2E latency, then all others by E2E latency.

    The first group is ordered by simplicity.
    """
    shortest = min(_mean_e2e(remedy) for remedy in remedies)

    def rank(remedy: Remedy) -> tuple[Any, ...]:
        effect = remedy.effect
        took = _mean_e2e(remedy)
        plain = (
            not remedy.to_default,
            ("flag", "version", "memory").index(remedy.means),
            not isinstance(effect.change.after, bool | str),
            len(effect.slower) + len(effect.newly_failed),
            took,
        )
        return (0, *plain) if took <= NEAR_BEST_RATIO * shortest else (1, took, *plain)

    return _smallest_first(sorted(remedies, key=rank))


def _smallest_first(remedies: list[Remedy]) -> list[Remedy]:
    """Put the smallest of the changes of a number before other changes with the same effect."""
    found = list(remedies)
    for place, one in enumerate(found):
        equal = [at for at in range(place, len(found)) if has_same_effect(one, found[at])]
        if equal:
            found.insert(place, found.pop(min(equal, key=lambda at: _distance(found[at]))))
    return found


def has_same_effect(one: Remedy, other: Remedy) -> bool:
    """Return whether two numbers of the same setting have the same effect on every request."""
    both = one.effect.change, other.effect.change
    numbers = all(type(value) in (int, float) for c in both for value in (c.before, c.after))
    return (
        numbers
        and both[0].field == both[1].field
        and one.effect.figures.endings == other.effect.figures.endings
        and one.gain == other.gain
    )


def _distance(remedy: Remedy) -> float:
    change = remedy.effect.change
    return abs(float(change.after) - float(change.before))
