"""Search settings of a scenario with Optuna. The study is stored, so that a search can be
resumed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.study.evolve.tournament import Candidate, Tournament
from simkv.study.job_runner import ProgressCallback
from simkv.study.sweep_axes import Axis, KnobValue

#: Number of settings requested at a time; they run in parallel.
BATCH_SIZE = 8


def tune(
    tournament: Tournament,
    axes: Sequence[Axis],
    budget: int,
    seed: int,
    store: Path | None,
    name: str,
    advance: ProgressCallback | None = None,
) -> None:
    """Try combinations of settings until the Optuna study ``name`` contains ``budget`` trials.

    ``store`` is the file of the study. Raises InputError if Optuna is not installed.
    """
    study = _study(tournament, seed, store, name)
    optuna = _optuna()
    kept = [one for one in study.trials if one.state == optuna.trial.TrialState.COMPLETE]
    tournament.add([_candidate(one.params, axes) for one in kept[:budget]])
    done = len(kept)
    while done < budget:
        asked = [study.ask() for _ in range(min(BATCH_SIZE, budget - done))]
        candidates = [_candidate({a.path: _value(one, a) for a in axes}, axes) for one in asked]
        for one, standing in zip(asked, tournament.add(candidates), strict=True):
            study.tell(one, list(standing.fitness))
        done += len(asked)
        if advance:
            advance(done, budget)


def _candidate(values: dict[str, KnobValue], axes: Sequence[Axis]) -> Candidate:
    return Candidate(tuple((axis.path, values[axis.path]) for axis in axes))


def _value(trial: Any, axis: Axis) -> KnobValue:
    span = axis.span
    if span is None:
        found: KnobValue = trial.suggest_categorical(axis.path, list(axis.values))
        return found
    if span.whole:
        return int(trial.suggest_int(axis.path, int(span.low), int(span.high), log=span.log))
    return float(trial.suggest_float(axis.path, span.low, span.high, log=span.log))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise InputError(
            "simkv evolve --over: Optuna is not installed; run pip install 'simkv[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _study(tournament: Tournament, seed: int, store: Path | None, name: str) -> Any:
    optuna = _optuna()
    storage = None
    if store is not None:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        store.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(store)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        ways = ["minimize"] * len(tournament.goals)
        study = optuna.create_study(
            storage=storage, study_name=name, directions=ways, load_if_exists=True
        )
        # A resumed study must not repeat its first samples.
        seed += len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return study
