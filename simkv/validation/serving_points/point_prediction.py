"""Predict the rows of a file. Each distinct configuration is simulated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simkv.core.errors import InputError
from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.cost_profile import CostProfile
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.calibration_rules import CostConstants
from simkv.costs.operators.configuration_kind import Configuration
from simkv.costs.operators.error_sources import ALWAYS, add_error_sources, packaged_sources
from simkv.costs.operators.profile_resolution import (
    compose_from_tables,
    estimate_from_data_sheet,
    resolve_profile,
)
from simkv.costs.profile_uncertainty import combine_ends
from simkv.study.worker_pool import open_executor
from simkv.validation.serving_points.closed_loop_replay import PointReplay, replay_point
from simkv.validation.serving_points.measured_rows import Latency, MeasuredRow
from simkv.validation.serving_points.serving_point import ServingPoint, point_of

#: Milliseconds added to every TTFT of the engine, for tokenization of the prompt, HTTP and
#: detokenization. The client measures from before the POST to the first chunk. The value is an
#: assumption.
CLIENT_MS = 8.0


@dataclass(frozen=True)
class Prediction:
    """Prediction of a row.

    ``latency`` and its interval from ``low`` to ``high`` are in ms, or None if unknown. ``why`` is
    the reason for a missing prediction, or contains notes.
    """

    row: MeasuredRow
    latency: Latency | None
    low: Latency | None = None
    high: Latency | None = None
    why: str = ""


@dataclass(frozen=True)
class PointJob:
    """A measured configuration to simulate.

    ``constants`` are the cost constants, or None for simkv's own constants.
    """

    point: ServingPoint
    constants: CostConstants | None = None

    @property
    def key(self) -> str:
        """Key of the job. Jobs with the same key have the same result."""
        return f"{self.point.key} {self.constants}"


def points_of(rows: Sequence[MeasuredRow]) -> list[ServingPoint | str]:
    """Return the simulation setup for each row, or the reason why the row cannot be simulated."""
    found: list[ServingPoint | str] = []
    for row in rows:
        try:
            found.append(point_of(row))
        except (InputError, ValueError) as error:  # ValueError: the engine rejects its settings
            found.append(str(error))
    return found


def predict(
    rows: Sequence[MeasuredRow],
    constants: Callable[[Configuration], CostConstants | None] = lambda _: None,
    *,
    jobs: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[Prediction]:
    """Return a prediction for each row, in the order of ``rows``.

    ``constants`` returns the cost constants for a configuration, or None for simkv's own constants.
    ``jobs`` is the number of processes. ``advance`` is called after each simulation.
    """
    points = points_of(rows)
    wanted = [None if isinstance(p, str) else PointJob(p, constants(p.kind)) for p in points]
    found = run_all([job for job in wanted if job], jobs=jobs, advance=advance)
    return [
        Prediction(row, None, why=str(point))
        if isinstance(point, str) or job is None
        else _prediction(row, point, found[job.key])
        for row, point, job in zip(rows, points, wanted, strict=True)
    ]


def run_all(
    wanted: Sequence[PointJob],
    *,
    jobs: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, PointReplay]:
    """Return the result of each job by its key. Jobs with equal keys run once."""
    # Jobs with the same costs are sent to one worker, the longest first.
    parts: dict[str, list[PointJob]] = {}
    for job in {job.key: job for job in wanted}.values():
        parts.setdefault(job.point.costs_key, []).append(job)
    order = sorted(parts.values(), key=lambda part: -sum(map(_work, part)))
    found: dict[str, PointReplay] = {}
    with open_executor(jobs=jobs) as run:
        for results in run(_run_part, order):
            for key, replayed in results:
                found[key] = replayed
                advance()
    return found


def _work(job: PointJob) -> float:
    """Return the approximate relative duration of a job."""
    load = job.point.load
    return load.prompts * (200 + load.osl / 8)


def _run_part(part: Sequence[PointJob]) -> list[tuple[str, PointReplay]]:
    made: dict[str, CostProfile | str] = {}
    found = []
    for job in part:
        costs = made.get(said := repr(job.constants))
        if costs is None:
            costs = made[said] = _costs(job.point.hardware, job.point.setting, job.constants)
        found.append((job.key, _run(job.point, costs)))
    return found


def _costs(
    hardware: Hardware, setting: ExecutionSettings, constants: CostConstants | None
) -> CostProfile | str:
    """Return the step costs, or the reason why they are unknown."""
    try:
        if constants is None:
            return resolve_profile(hardware, setting)
        found = compose_from_tables(hardware, setting, constants=constants)
        found = found or estimate_from_data_sheet(hardware, setting, constants=constants)
        return add_error_sources(found, hardware, setting)
    except InputError as error:
        return str(error)


def _run(point: ServingPoint, costs: CostProfile | str) -> PointReplay:
    if isinstance(costs, str):
        return PointReplay(None, why=costs)
    replayed = replay_point(point.engine, costs, point.load, point.hardware.dp)
    if replayed.latency is None:
        return replayed
    ttft, tpot = replayed.latency
    front = CLIENT_MS + 1e3 * costs.front_s
    return replace(
        replayed,
        latency=Latency(ttft + front, tpot),
        why=costs.basis,
        sources=tuple(costs.fit.sources),
        unmeasured=bool(costs.fit.unmeasured_kernels),
    )


def _prediction(row: MeasuredRow, point: ServingPoint, replayed: PointReplay) -> Prediction:
    if replayed.latency is None:
        return Prediction(row, None, why=replayed.why)
    # The laboratory is that of the fit, and perhaps the hosts.
    known = row.source in packaged_sources().provenance.get("exports", ())
    sources = [s for s in replayed.sources if s.name not in (*ALWAYS, *["host"] * known)]
    notes = [replayed.why, *point.notes]
    if not sources:
        notes.append("no interval: no measurement of this engine")
        return Prediction(row, replayed.latency, why="; ".join(notes))
    notes.append(f"sources of error: {', '.join(source.name for source in sources)}")
    ends = [
        combine_ends([source.ends[step] for source in sources]) for step in ("prefill", "decode")
    ]
    low, high = (
        Latency(*(v * math.exp(e[side]) for v, e in zip(replayed.latency, ends, strict=True)))
        for side in (0, 1)
    )
    return Prediction(row, replayed.latency, low, high, "; ".join(notes))
