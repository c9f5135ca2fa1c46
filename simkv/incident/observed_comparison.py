"""Compare observed and simulated figures, and decide whether the simulation reproduces them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.incident.evidence import sum_over_ranks
from simkv.incident.incident_simulation import sample_state
from simkv.sim.run_record import RunRecord

Floats = npt.NDArray[np.float64]
#: Number of sampled times if there is no log.
MOMENTS = 200
#: Tolerances (relative): means; tails and TPOT; queue time, relative to itself or to the mean E2E.
#: A larger difference means that the incident is not reproduced.
MEAN_TOLERANCE, TAIL_TOLERANCE, QUEUE_TOLERANCE, QUEUE_E2E_TOLERANCE = 0.15, 0.25, 0.3, 0.1
#: Tolerance of the mean number of running or waiting requests, relative to requests in the system;
#: a difference of one request is always accepted.
IN_SYSTEM_TOLERANCE = 0.3
FIGURES = (("e2e_ms", "E2E"), ("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("queue_ms", "queued"))


@dataclass(frozen=True)
class FigureMatch:
    """An observed and a simulated figure, in s (or requests), and whether they agree."""

    name: str
    observed: float
    simulated: float
    agrees: bool

    @property
    def relative_error(self) -> float:
        """Relative error of the simulated value."""
        return self.simulated / self.observed - 1 if self.observed else 0.0


@dataclass(frozen=True)
class ObservedComparison:
    """Comparison of all figures.

    ``moments`` is the table over time: t_s, and running, waiting and usage with the prefixes
    ``observed_`` and ``simulated_``.
    """

    lines: tuple[FigureMatch, ...]
    moments: pd.DataFrame

    @property
    def reproduced(self) -> bool:
        """Whether all figures agree."""
        return all(line.agrees for line in self.lines)

    @property
    def missed(self) -> list[FigureMatch]:
        """Figures that do not agree."""
        return [line for line in self.lines if not line.agrees]


def compare_observed(
    parts: Sequence[RunRecord],
    simulated: pd.DataFrame,
    observed: pd.DataFrame,
    series: pd.DataFrame | None,
    origin: float,
    *,
    died: bool = False,
) -> ObservedComparison:
    """Compare a simulation with the observation.

    ``simulated`` and ``observed`` are the same requests in the same order, in ms. ``origin`` is
    time 0 of the records on the clock of ``series``. ``died`` is true if the server reported its
    death.
    """
    moments = _moments(parts, observed, series, origin)
    lines = [*_latencies(simulated, observed), *_answers(simulated, observed)]
    stop = next((part.engine_halt for part in parts if part.engine_halt), None)
    if died or (stop is not None and stop.kind == "engine died"):
        made = stop is not None and stop.kind == "engine died"
        lines.append(FigureMatch("the engine died", float(died), float(made), died == made))
    return ObservedComparison((*lines, *_presence(moments)), moments)


def series_distance(parts: Sequence[RunRecord], series: pd.DataFrame, origin: float) -> float:
    """Return the distance of a run from a server's lines.

    It is the sum of the mean differences in running and in waiting requests, relative to requests
    in the system, and in cache usage.
    """
    moments = _moments(parts, pd.DataFrame(), series, origin)
    present = moments[["observed_running", "observed_waiting"]].sum(axis="columns").mean()
    found = 0.0
    for name, unit in (("running", present), ("waiting", present), ("usage", 1.0)):
        differences = (moments[f"observed_{name}"] - moments[f"simulated_{name}"]).abs()
        found += float(np.nan_to_num(differences.mean())) / max(float(unit), 1e-9)
    return found


def _latencies(simulated: pd.DataFrame, observed: pd.DataFrame) -> list[FigureMatch]:
    found = []
    whole = observed["e2e_ms"].mean() / 1e3
    for column, name in FIGURES:
        both = (
            pd.DataFrame(
                {"seen": observed[column].to_numpy(), "made": simulated[column].to_numpy()}
            ).dropna()
            / 1e3
        )
        if not len(both):
            continue
        seen, made = float(both["seen"].mean()), float(both["made"].mean())
        apart = abs(made - seen)
        if column == "e2e_ms":
            agrees = apart <= MEAN_TOLERANCE * seen
        elif column == "tpot_ms":
            agrees = apart <= TAIL_TOLERANCE * seen
        else:
            agrees = apart <= QUEUE_TOLERANCE * seen or apart <= QUEUE_E2E_TOLERANCE * whole
        found.append(FigureMatch(f"{name} mean (s)", seen, made, bool(agrees)))
        if column == "e2e_ms":
            seen, made = float(both["seen"].quantile(0.9)), float(both["made"].quantile(0.9))
            found.append(
                FigureMatch("E2E p90 (s)", seen, made, abs(made - seen) <= TAIL_TOLERANCE * seen)
            )
    return found


def _answers(simulated: pd.DataFrame, observed: pd.DataFrame) -> list[FigureMatch]:
    """Compare the number of requests without an answer, if there are any."""
    seen = int((observed["output_tokens"] == 0).sum())
    made = int(simulated["e2e_ms"].isna().sum())
    if not seen and not made:
        return []
    agrees = abs(seen - made) <= max(0.25 * seen, 1) and (seen > 0) == (made > 0)
    return [FigureMatch("without an answer (requests)", seen, made, agrees)]


def _presence(moments: pd.DataFrame) -> list[FigureMatch]:
    if not len(moments):
        return []
    found = []
    for name in ("running", "waiting"):
        both = moments[[f"observed_{name}", f"simulated_{name}"]].dropna()
        seen, made = both.mean().tolist() if len(both) else (0.0, 0.0)
        whole = moments[["observed_running", "observed_waiting"]].sum(axis="columns").mean()
        agrees = abs(made - seen) <= max(IN_SYSTEM_TOLERANCE * whole, 1.0)
        found.append(FigureMatch(f"{name}, on the mean (requests)", seen, made, bool(agrees)))
    return found


def _moments(
    parts: Sequence[RunRecord],
    observed: pd.DataFrame,
    series: pd.DataFrame | None,
    origin: float,
) -> pd.DataFrame:
    """Return observed and simulated state over time; without a log, derived from the requests."""
    if series is not None and len(series):
        summed = sum_over_ranks(series)
        at = np.asarray(summed.index.to_numpy(np.float64) - origin)
        seen = summed.reset_index(drop=True)
    else:
        begin, scheduled, end = _known(observed, origin)
        last = float(end[np.isfinite(end)].max()) if np.isfinite(end).any() else 1.0
        at = np.linspace(0.0, last, MOMENTS)
        running = _count(scheduled, end, at)
        waiting = _count(begin, np.where(np.isfinite(scheduled), scheduled, end), at)
        seen = pd.DataFrame({"running": running, "waiting": waiting, "usage": np.nan})
        if observed["queue_ms"].isna().all():
            seen[["running", "waiting"]] = np.nan
    made = sample_state(parts, at)
    return pd.concat(
        [
            pd.Series(at, name="t_s"),
            seen.add_prefix("observed_"),
            made.add_prefix("simulated_"),
        ],
        axis="columns",
    )


def _known(observed: pd.DataFrame, origin: float) -> tuple[Floats, Floats, Floats]:
    begin = (observed["t_s"] - origin).to_numpy(np.float64)
    queue = (observed["queue_ms"] / 1e3).to_numpy(np.float64)
    return begin, begin + queue, begin + (observed["e2e_ms"] / 1e3).to_numpy(np.float64)


def _count(start: Floats, end: Floats, at: Floats) -> Floats:
    """Return the number of intervals that are open at each time."""
    good = np.isfinite(start) & np.isfinite(end)
    begun = np.searchsorted(np.sort(start[good]), at, "right")
    return np.asarray(begun - np.searchsorted(np.sort(end[good]), at, "right"), np.float64)
