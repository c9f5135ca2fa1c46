"""Calibrate the packaged constants and sources of error from measured rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dev.serving_points.constant_fit import Fitted, choose
from dev.serving_points.fit_samples import NONE, Residual, samples_of
from dev.serving_points.source_fit import WAYS, HeldOut, fit_sources, hold_out, left_out_ends
from simkv.core.atomic_files import write_text
from simkv.costs.operators.calibration_rules import CostConstants
from simkv.costs.operators.error_sources import ErrorSources
from simkv.validation.serving_points.closed_loop_replay import PointReplay
from simkv.validation.serving_points.latency_gradients import FITTED_CONSTANTS, Floats
from simkv.validation.serving_points.measured_rows import Latency, MeasuredRow
from simkv.validation.serving_points.point_prediction import (
    PointJob,
    Prediction,
    points_of,
    run_all,
)
from simkv.validation.serving_points.serving_point import ServingPoint

RULES, SOURCES = "constants.json", "error_sources.json"


@dataclass(frozen=True)
class Calibrated:
    """Result of a calibration: samples, constants, sources of error and coverage of the intervals.

    ``left_out`` has a prediction for each row, with constants and an interval fitted without the
    row's configuration. ``unseen`` has predictions fitted without the row's pair of model and GPU.
    """

    samples: list[Residual]
    fitted: Fitted
    sources: ErrorSources
    covered: dict[str, tuple[float, float, int]]
    left_out: list[Prediction]
    unseen: list[Prediction]


def calibrate(
    rows: Sequence[MeasuredRow],
    source: str,
    *,
    jobs: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Calibrated:
    """Fit constants to measured rows, starting from operator costs without constants; ``source``
    names the rows.
    """
    points = points_of(rows)
    return learn(rows, points, replay_points(points, jobs=jobs, advance=advance), source)


def replay_points(
    points: Sequence[ServingPoint | str],
    *,
    jobs: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[PointReplay | None]:
    """Replay each point with operator costs and without constants; the result is None for a point
    that cannot be simulated.
    """
    wanted = [None if isinstance(p, str) else PointJob(p, CostConstants()) for p in points]
    found = run_all([job for job in wanted if job], jobs=jobs, advance=advance)
    return [None if job is None else found[job.key] for job in wanted]


def learn(
    rows: Sequence[MeasuredRow],
    points: Sequence[ServingPoint | str],
    replayed: Sequence[PointReplay | None],
    source: str,
) -> Calibrated:
    """Fit constants to replays, which were made without fitted constants."""
    samples = samples_of(rows, points, replayed)
    fitted = choose(samples)
    held_out = hold_out(samples, fitted.ladder)
    provenance = {
        "from": source,
        "measurements": len(samples),
        "configurations": len({s.configuration for s in samples}),
        "exports": sorted({s.source for s in samples}),
        "constants by": fitted.chosen,
        "constants": next(t.number for t in fitted.tried if t.name == fitted.chosen),
    }
    predicted, covered = [], {}
    for way in ("configuration", "pair"):
        own = held_out.of(way)
        ends = left_out_ends(samples, held_out, own, WAYS[way])
        predicted.append(predictions_of(rows, points, samples, own.logs, ends))
        covered[f"{way}s"] = coverage(own, ends)
    return Calibrated(
        samples, fitted, fit_sources(samples, held_out, provenance), covered, *predicted
    )


def coverage(own: HeldOut, ends: Floats) -> tuple[float, float, int]:
    """Return the shares of residuals (TTFT, TPOT) inside the intervals, and their number."""
    told = ~np.isnan(ends[:, 0, 0])
    logs = own.logs[told]
    inside = (ends[told, :, 0] <= logs) & (logs <= ends[told, :, 1])
    shares = inside.mean(axis=0) if told.any() else (0.0, 0.0)
    return float(shares[0]), float(shares[1]), int(told.sum())


def predictions_of(
    rows: Sequence[MeasuredRow],
    points: Sequence[ServingPoint | str],
    samples: Sequence[Residual],
    logs: Floats,
    sides: Floats,
) -> list[Prediction]:
    """Predict each row whose measurement is a sample; for all other rows, give the reason why there
    is no prediction.
    """
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
    """Write ``constants.json`` and ``error_sources.json`` into an existing folder."""
    told = {k: v for k, v in found.sources.provenance.items() if k != "exports"}
    source = "; ".join(f"{k}: {v}" for k, v in told.items())
    rules = rules_of(found.samples, found.fitted, source)
    write_text(folder / RULES, json.dumps(rules, indent=1) + "\n")
    write_text(folder / SOURCES, json.dumps(found.sources.to_json(), indent=1) + "\n")


def rules_of(samples: Sequence[Residual], fitted: Fitted, source: str) -> list[dict[str, Any]]:
    """Return the rules of ``constants.json``; each level changes the result of the level before it.

    Every rule names a measured GPU family, so no rule applies to a GPU of another family.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind in {sample.kind for sample in samples}:
        before = NONE
        for level in fitted.ladder:
            after = fitted.values[level.name(kind)]
            fields = dict.fromkeys((*level.fields, "family"))
            chosen = {field: getattr(kind, field) for field in fields}
            rule = {"kind": chosen, "constants": _changes(before, after), "source": source}
            found[repr(chosen)] = rule
            before = after
    return sorted(found.values(), key=lambda r: (len(r["kind"]), sorted(r["kind"].items())))


def _changes(before: Floats, after: Floats) -> dict[str, float]:
    """Return the changes of the constants: ratios for factors, differences for seconds."""
    found = {}
    for name, old, new in zip(FITTED_CONSTANTS, before, after, strict=True):
        change = round(new - old, 8) if name.endswith("_s") else round(new / old, 5)
        if change != (0.0 if name.endswith("_s") else 1.0):
            found[name] = float(change)
    return found
