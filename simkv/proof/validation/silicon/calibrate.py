"""The calibration: constants and spreads, from rows to the files that come with simkv."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simkv.core.files import write_text
from simkv.costs.operators.constants import Constants
from simkv.costs.operators.spreads import Kind, Spreads
from simkv.proof.validation.silicon.fit import (
    Fitted,
    choose,
    coverage,
    fold_ends,
    levels_of,
    pair_ends,
    spreads,
    values_for,
)
from simkv.proof.validation.silicon.point import Point
from simkv.proof.validation.silicon.predict import Job, Prediction, points_of, run_all
from simkv.proof.validation.silicon.replay import Replayed
from simkv.proof.validation.silicon.rows import Latency, Row
from simkv.proof.validation.silicon.samples import NONE, Sample, samples_of
from simkv.proof.validation.silicon.slopes import MOVED, Floats

RULES, SPREADS = "constants.json", "spreads.json"
#: Fields of a rule that name a level, from the widest.
FIELDS = (
    ("backend",),
    ("backend", "family", "mlp"),
    ("backend", "family", "attention", "experts", "weights"),
    ("backend", "gpu", "attention", "experts", "weights"),
)


@dataclass(frozen=True)
class Calibrated:
    """What was fitted, to which samples, and the shares of left-out points inside spreads.

    ``left_out`` are predictions of all rows, each from constants and an interval that its
    configuration had no part in; ``unseen`` the same of its pair of model and GPU.
    """

    samples: list[Sample]
    fitted: Fitted
    spreads: Spreads
    covered: dict[str, tuple[float, float, int]]
    left_out: list[Prediction]
    unseen: list[Prediction]


def calibrate(
    rows: Sequence[Row],
    source: str,
    *,
    jobs: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Calibrated:
    """Fit constants to the measured rows, starting from operators alone; ``source`` names them."""
    points = points_of(rows)
    wanted = [None if isinstance(p, str) else Job(p, Constants()) for p in points]
    found = run_all([job for job in wanted if job], jobs=jobs, advance=advance)
    replayed = [None if job is None else found[job.key] for job in wanted]
    return learn(rows, points, replayed, source)


def learn(
    rows: Sequence[Row],
    points: Sequence[Point | str],
    replayed: Sequence[Replayed | None],
    source: str,
) -> Calibrated:
    """Fit constants to replays that were made without any."""
    samples = samples_of(rows, points, replayed)
    fitted = choose(samples)
    groups, unseen = spreads(samples, fitted)
    provenance = {
        "from": source,
        "measurements": len(samples),
        "configurations": len({s.configuration for s in samples}),
        "fineness": fitted.tried[fitted.fineness].name,
        "constants": fitted.tried[fitted.fineness].number,
    }
    return Calibrated(
        samples,
        fitted,
        Spreads(groups, unseen, provenance),
        coverage(samples, fitted),
        _predictions(rows, points, samples, fitted.configurations, fold_ends(samples, fitted)),
        _predictions(rows, points, samples, fitted.groups, pair_ends(samples, fitted)),
    )


def _predictions(
    rows: Sequence[Row],
    points: Sequence[Point | str],
    samples: Sequence[Sample],
    logs: Floats,
    sides: Floats,
) -> list[Prediction]:
    """Predictions of all rows whose measurement is a sample; others are refused."""
    place = {sample.measurement: i for i, sample in enumerate(samples)}
    found = []
    for row, point in zip(rows, points, strict=True):
        i = place.get(row.measurement)
        if i is None:
            found.append(Prediction(row, None, why=point if isinstance(point, str) else "apart"))
            continue
        said = samples[i].real * np.exp(-logs[i])
        low, high = (
            None if np.isnan(sides[i, 0, end]) else Latency(*(said * np.exp(sides[i, :, end])))
            for end in (0, 1)
        )
        found.append(Prediction(row, Latency(*said), low, high))
    return found


def write(folder: Path, found: Calibrated) -> None:
    """Write ``constants.json`` and ``spreads.json`` into a folder that exists."""
    source = "; ".join(f"{k}: {v}" for k, v in found.spreads.provenance.items())
    rules = rules_of(found.samples, found.fitted, source)
    write_text(folder / RULES, json.dumps(rules, indent=1) + "\n")
    write_text(folder / SPREADS, json.dumps(found.spreads.to_json(), indent=1) + "\n")


def rules_of(samples: Sequence[Sample], fitted: Fitted, source: str) -> list[dict[str, Any]]:
    """Rules of ``constants.json``: each level changes what the wider one before it said.

    What an engine's points have in common is no rule: a GPU of a family that was never measured
    gets no constants, for those of others do not hold there.
    """
    kinds: dict[str, Kind] = {}
    for sample in samples:
        for name in levels_of(sample.kind, fitted.fineness):
            kinds.setdefault(name, sample.kind)
    rules = []
    for name, kind in kinds.items():
        depth = levels_of(kind, fitted.fineness).index(name)
        if not depth:
            continue
        before = values_for(kind, fitted.values, depth) if depth > 1 else NONE
        changes = _changes(before, fitted.values[name])
        fields = {field: getattr(kind, field) for field in FIELDS[depth]}
        rules.append({"kind": fields, "constants": changes, "source": source})
    return sorted(
        rules, key=lambda r: (len(r["kind"]), "gpu" in r["kind"], sorted(r["kind"].items()))
    )


def _changes(before: Floats, after: Floats) -> dict[str, float]:
    """What turns some constants into others: factors by division, seconds by difference."""
    found = {}
    for name, old, new in zip(MOVED, before, after, strict=True):
        change = round(new - old, 8) if name.endswith("_s") else round(new / old, 5)
        if change != (0.0 if name.endswith("_s") else 1.0):
            found[name] = float(change)
    return found
