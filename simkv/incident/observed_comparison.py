"""Compare observed and simulated metrics, and decide whether the simulation reproduces the
incident.
"""

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
#: Number of times at which the state is compared if there is no log.
MOMENTS = 200
#: Relative tolerances for means, for tail latencies and TPOT, for the queue time, and for the queue
#: time relative to the mean E2E. If a difference is larger, the incident is not reproduced.
MEAN_TOLERANCE, TAIL_TOLERANCE, QUEUE_TOLERANCE, QUEUE_E2E_TOLERANCE = 0.15, 0.25, 0.3, 0.1
#: Tolerance of the mean number of running or waiting requests, relative to the requests in the
#: system; a difference of one request is always accepted.
IN_SYSTEM_TOLERANCE = 0.3
#: Absolute tolerance of the prefix hit rate, and the number of requests that the rate covers.
HIT_RATE_TOLERANCE, HIT_RATE_REQUESTS = 0.1, 1000
#: Relative tolerance of the number of preemptions.
PREEMPTION_TOLERANCE = 0.25
#: Relative error above which the absolute difference is reported instead.
MAX_RELATIVE_ERROR = 10.0
FIGURES = (("e2e_ms", "E2E"), ("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("queue_ms", "queued"))


@dataclass(frozen=True)
class FigureMatch:
    """An observed and a simulated value of one metric, in seconds or requests.

    ``tolerance`` is the accepted difference as text. ``reconstructed`` is true if the observed
    value was sampled instead of measured. ``decides`` is true if the metric affects the verdict.
    """

    name: str
    observed: float
    simulated: float
    agrees: bool
    tolerance: str = ""
    reconstructed: bool = False
    decides: bool = True

    @property
    def kind(self) -> str:
        """Origin of the observed value: ``measured`` or ``reconstructed``."""
        return "reconstructed" if self.reconstructed else "measured"

    @property
    def difference(self) -> str:
        """The difference in percent, or absolute if the observed value is close to zero."""
        error = self.relative_error
        if self.observed > 0 and abs(error) <= MAX_RELATIVE_ERROR:
            return f"{100 * error:+.1f} %"
        return f"{self.simulated - self.observed:+.3g}"

    @property
    def relative_error(self) -> float:
        """Error of the simulated value relative to the observed value."""
        return self.simulated / self.observed - 1 if self.observed else 0.0


@dataclass(frozen=True)
class ObservedComparison:
    """Comparison of all metrics of an incident.

    ``moments`` is a table over time with running requests, waiting requests and cache usage. Its
    columns have the prefixes ``observed_`` and ``simulated_``.
    """

    lines: tuple[FigureMatch, ...]
    moments: pd.DataFrame

    @property
    def reproduced(self) -> bool:
        """Whether all deciding metrics are within their tolerance."""
        return all(line.agrees for line in self.lines if line.decides)

    @property
    def missed(self) -> list[FigureMatch]:
        """Metrics whose simulated value is outside the tolerance."""
        return [line for line in self.lines if line.decides and not line.agrees]


def compare_observed(
    parts: Sequence[RunRecord],
    simulated: pd.DataFrame,
    observed: pd.DataFrame,
    series: pd.DataFrame | None,
    origin: float,
    *,
    died: bool = False,
    reconstructed: bool = False,
) -> ObservedComparison:
    """Compare a simulation with the observation.

    ``simulated`` and ``observed`` contain the same requests in the same order, with times in ms.
    ``parts`` contains the record of each data-parallel rank. ``origin`` is the start of the
    simulation on the clock of ``series`` (s).
    """
    moments = _moments(parts, observed, series, origin)
    lines = [*_latencies(simulated, observed, reconstructed), *_answers(simulated, observed)]
    stop = next((part.engine_halt for part in parts if part.engine_halt), None)
    if died or (stop is not None and stop.kind == "engine died"):
        made = stop is not None and stop.kind == "engine died"
        lines.append(FigureMatch("the engine died", float(died), float(made), died == made))
    lines += [*_presence(moments), *_hit_rate(parts, series), *_preemptions(parts, series)]
    return ObservedComparison(tuple(lines), moments)


def _hit_rate(parts: Sequence[RunRecord], series: pd.DataFrame | None) -> list[FigureMatch]:
    """Compare the last logged prefix hit rate with the simulated one.

    Both rates are averages over the most recent requests, as in the engine.
    """
    if series is None or "hit_rate" not in series or not series["hit_rate"].max() > 0:
        return []
    seen = float(series.dropna(subset=["hit_rate"]).groupby("engine")["hit_rate"].last().mean())
    prompts = sorted(
        (life.first_token, life.chunks[0].context if life.chunks else 0, life.request.prompt_tokens)
        for record in parts
        for life in record.requests.values()
        if life.first_token is not None
    )[-HIT_RATE_REQUESTS * len(parts) :]
    made = sum(hit for _, hit, _ in prompts) / (sum(asked for _, _, asked in prompts) or 1)
    agrees = abs(made - seen) <= HIT_RATE_TOLERANCE
    tolerance = f"{100 * HIT_RATE_TOLERANCE:.0f} points; reported only"
    return [FigureMatch("prefix hit rate", seen, made, agrees, tolerance, decides=False)]


def _preemptions(parts: Sequence[RunRecord], series: pd.DataFrame | None) -> list[FigureMatch]:
    """Compare the number of preemptions, if the log reports it."""
    if series is None or "preemptions" not in series or not series["preemptions"].sum() > 0:
        return []
    seen = float(series["preemptions"].sum())
    made = float(sum(len(life.preempted_at) for part in parts for life in part.requests.values()))
    agrees = abs(made - seen) <= PREEMPTION_TOLERANCE * seen
    tolerance = f"{_percent(PREEMPTION_TOLERANCE)}; reported only"
    return [FigureMatch("preemptions", seen, made, agrees, tolerance, decides=False)]


def series_distance(parts: Sequence[RunRecord], series: pd.DataFrame, origin: float) -> float:
    """Return the distance between a run and the statistics lines of a server.

    The distance is the sum of the mean absolute differences in running requests, waiting requests
    and cache usage. The differences in requests are relative to the number of requests in the
    system.
    """
    moments = _moments(parts, pd.DataFrame(), series, origin)
    present = moments[["observed_running", "observed_waiting"]].sum(axis="columns").mean()
    found = 0.0
    for name, unit in (("running", present), ("waiting", present), ("usage", 1.0)):
        differences = (moments[f"observed_{name}"] - moments[f"simulated_{name}"]).abs()
        found += float(np.nan_to_num(differences.mean())) / max(float(unit), 1e-9)
    return found


def _latencies(
    simulated: pd.DataFrame, observed: pd.DataFrame, reconstructed: bool
) -> list[FigureMatch]:
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
            agrees, tolerance = apart <= MEAN_TOLERANCE * seen, _percent(MEAN_TOLERANCE)
        elif column == "tpot_ms":
            agrees, tolerance = apart <= TAIL_TOLERANCE * seen, _percent(TAIL_TOLERANCE)
        else:
            agrees = apart <= QUEUE_TOLERANCE * seen or apart <= QUEUE_E2E_TOLERANCE * whole
            tolerance = f"{_percent(QUEUE_TOLERANCE)} or {_percent(QUEUE_E2E_TOLERANCE)} of E2E"
        label = f"{name} mean (s)"
        found.append(FigureMatch(label, seen, made, bool(agrees), tolerance, reconstructed))
        if column == "e2e_ms":
            seen, made = float(both["seen"].quantile(0.9)), float(both["made"].quantile(0.9))
            agrees = abs(made - seen) <= TAIL_TOLERANCE * seen
            tolerance = _percent(TAIL_TOLERANCE)
            found.append(
                FigureMatch("E2E p90 (s)", seen, made, bool(agrees), tolerance, reconstructed)
            )
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _answers(simulated: pd.DataFrame, observed: pd.DataFrame) -> list[FigureMatch]:
    """Compare the number of requests without an answer, unless both numbers are 0."""
    seen = int((observed["output_tokens"] == 0).sum())
    made = int(simulated["e2e_ms"].isna().sum())
    if not seen and not made:
        return []
    agrees = abs(seen - made) <= max(0.25 * seen, 1) and (seen > 0) == (made > 0)
    return [FigureMatch("without an answer (requests)", seen, made, agrees, "25 % or 1 request")]


def _presence(moments: pd.DataFrame) -> list[FigureMatch]:
    if not len(moments):
        return []
    found = []
    for name in ("running", "waiting"):
        both = moments[[f"observed_{name}", f"simulated_{name}"]].dropna()
        seen, made = both.mean().tolist() if len(both) else (0.0, 0.0)
        whole = moments[["observed_running", "observed_waiting"]].sum(axis="columns").mean()
        agrees = abs(made - seen) <= max(IN_SYSTEM_TOLERANCE * whole, 1.0)
        tolerance = f"{_percent(IN_SYSTEM_TOLERANCE)} of requests in the system, or 1"
        found.append(FigureMatch(f"mean {name} (requests)", seen, made, bool(agrees), tolerance))
    return found


def _moments(
    parts: Sequence[RunRecord],
    observed: pd.DataFrame,
    series: pd.DataFrame | None,
    origin: float,
) -> pd.DataFrame:
    """Return the observed and simulated server state over time.

    Without a log, the observed state is derived from the times of the requests.
    """
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
    """Return the number of intervals from ``start`` to ``end`` that contain each time in ``at``."""
    good = np.isfinite(start) & np.isfinite(end)
    begun = np.searchsorted(np.sort(start[good]), at, "right")
    return np.asarray(begun - np.searchsorted(np.sort(end[good]), at, "right"), np.float64)
