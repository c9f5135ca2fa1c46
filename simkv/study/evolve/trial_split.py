"""Trials of a search: some to select candidates, and held-out trials to evaluate the winner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import inf, isfinite
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.costs.scaled_executor import ErrorSide
from simkv.scenario.scenario import Scenario, StepScale
from simkv.scenario.scenario_costs import list_replica_costs
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.field_changes import with_field
from simkv.study.plan.plan_confidence import find_profile_error
from simkv.study.random_seeds import find_seed, reseed_scenario, with_form

#: First seeds of the final round and of the evaluation; the search uses lower seeds.
FIRST_FINAL_SEED, FIRST_TEST_SEED = 500, 1000
#: Factors on cache sizes and request rates in the evaluation of the winner.
CACHE_FACTORS, RATE_FACTORS = (0.75, 1.25), (0.8, 1.25)


@dataclass(frozen=True)
class TrialScenario:
    """A scenario on which candidates are tried, with one seed or one time window of a trace.

    Paths in the scenario are relative to ``folder``.
    """

    name: str
    scenario: Scenario
    folder: Path


@dataclass(frozen=True)
class EvaluationCondition:
    """A changed condition for evaluating the winner, such as another request rate.

    ``trials`` contains the held-out trials under this condition.
    """

    description: str
    trials: tuple[TrialScenario, ...]


@dataclass(frozen=True)
class TrialSplit:
    """Trials for the search, for the final round, and for the evaluation of the winner.

    ``train`` begins with one trial of each scenario. ``held_out`` describes the trials of the
    evaluation, or is None if the workload has no randomness.
    """

    train: tuple[TrialScenario, ...]
    final: tuple[TrialScenario, ...]
    test: tuple[TrialScenario, ...]
    held_out: str | None
    scenarios: int = 1


def split_trials(
    scenarios: Sequence[tuple[Scenario, Path]], train: int, final: int, test: int
) -> TrialSplit:
    """Return trials with different seeds or trace windows for search, final round and test."""
    parts = [_split(scenario, folder, train, final, test) for scenario, folder in scenarios]
    words = dict.fromkeys(part.held_out for part in parts)
    in_turn = zip_longest(*(part.train for part in parts))
    return TrialSplit(
        tuple(trial for turn in in_turn for trial in turn if trial is not None),
        () if None in words else tuple(trial for part in parts for trial in part.final),
        tuple(trial for part in parts for trial in part.test),
        None if None in words else "; ".join(str(word) for word in words),
        len(parts),
    )


def _split(scenario: Scenario, folder: Path, train: int, final: int, test: int) -> TrialSplit:
    ends = train, train + final
    if find_seed(scenario.workload) is not None:
        seeds = [
            *range(train),
            *range(FIRST_FINAL_SEED, FIRST_FINAL_SEED + final),
            *range(FIRST_TEST_SEED, FIRST_TEST_SEED + test),
        ]
        trials = [TrialScenario(f"seed {i}", reseed_scenario(scenario, i), folder) for i in seeds]
        apart = f"{test} other seeds"
    elif scenario.workload.trace is not None:
        trials = _windows(scenario, folder, train + final + test)
        apart = f"the last {test} windows of the trace"
    else:
        only = (TrialScenario("unchanged", scenario, folder),)
        return TrialSplit(only, (), only, None)
    search, last, judged = trials[: ends[0]], trials[ends[0] : ends[1]], trials[ends[1] :]
    return TrialSplit(tuple(search), tuple(last), tuple(judged), apart)


def _windows(scenario: Scenario, folder: Path, count: int) -> list[TrialScenario]:
    """Split a trace into ``count`` time windows of equal length. Each starts with empty queues."""
    workload = scenario.workload
    arrivals = [request.arrival for request in workload.loaded.requests(None)]
    end = max(arrivals, default=0.0) * workload.rate_scale
    if end <= 0 or len(arrivals) < 10 * count:
        raise InputError(
            f"{workload.path}: {len(arrivals)} requests are too few for {count} windows; expected "
            f"at least {10 * count}"
        )
    wide = end / count
    found = []
    for i in range(count):
        window = {"start": workload.start + i * wide, "duration": wide}
        part = workload.model_copy(update=window)
        found.append(
            TrialScenario(f"window {i + 1}", scenario.model_copy(update={"workload": part}), folder)
        )
    return found


def build_evaluation_conditions(
    ground: TrialSplit, given_error: float | None
) -> tuple[list[EvaluationCondition], list[str]]:
    """Return the conditions for evaluating the winner, and notes on impossible conditions."""
    found = [EvaluationCondition("as configured", ground.test)]
    changes: list[tuple[str, Callable[[TrialScenario], Scenario]]] = [
        *((f"cache x {x:g}", partial(_sized, by=x)) for x in CACHE_FACTORS),
        *((f"rate x {x:g}", partial(_paced, by=x)) for x in RATE_FACTORS),
        ("steps faster by the profile's error", partial(_on, side="faster", given=given_error)),
        ("steps slower by the profile's error", partial(_on, side="slower", given=given_error)),
    ]
    missing: dict[str, list[str]] = {}
    for name, change in changes:
        try:
            trials = [TrialScenario(one.name, change(one), one.folder) for one in ground.test]
        except InputError as error:
            missing.setdefault(str(error), []).append(name)
            continue
        found.append(EvaluationCondition(name, tuple(trials)))
    return found, [f"Not evaluated: {', '.join(names)}: {why}" for why, names in missing.items()]


def _sized(trial: TrialScenario, by: float) -> Scenario:
    engine = trial.scenario.engine
    knob = find_engine_spec(engine).memory
    return with_field(
        trial.scenario, f"engine.{knob}", round(getattr(engine, knob) * by), trial.folder
    )


def _paced(trial: TrialScenario, by: float) -> Scenario:
    """Return the scenario with ``by`` times its request rate."""
    workload = trial.scenario.workload
    changed: dict[str, Any] = {}
    form = workload.arrivals or workload.sessions
    rate = getattr(form, "request_rate", None) or inf
    if form is not None and isfinite(rate):
        changed = with_form(workload, request_rate=rate * by)
    elif workload.trace is not None and workload.request_rate is not None:
        changed = {"request_rate": workload.request_rate * by}
    elif workload.trace is not None:
        changed = {"rate_scale": workload.rate_scale * by}
    elif workload.burst is not None:
        interval = workload.burst.interval / by
        changed = {"burst": workload.burst.model_copy(update={"interval": interval})}
    elif workload.requests is not None:
        rows = [one.model_copy(update={"arrival": one.arrival / by}) for one in workload.requests]
        changed = {"requests": rows}
    if not changed:
        raise InputError(
            "the workload has no request rate, so it cannot be simulated at other "
            "rates; use another form of workload, such as arrivals with request_rate"
        )
    return trial.scenario.model_copy(update={"workload": workload.model_copy(update=changed)})


def _on(trial: TrialScenario, side: ErrorSide, given: float | None) -> Scenario:
    """Return the scenario with all steps faster or slower (``side``) by the profile's error."""
    scenario = trial.scenario
    profile = next(costs for _, costs in list_replica_costs(scenario)).load(trial.folder)
    error = find_profile_error(profile, given)
    if not error.factors:
        raise InputError(f"{error.note}; state the error with --profile-error")
    own = scenario.step_scale or StepScale()
    scale = own.model_copy(update={"error": side})
    if not error.own:
        factors: dict[str, float] = {
            kind: getattr(own, kind) * x for kind, x in error.factors[side].items()
        }
        scale = own.model_copy(update=factors)
    return scenario.model_copy(update={"step_scale": scale})
