"""Join several sources of one incident: by request id if possible, otherwise by time.

A log uses the local time of its server, and a client uses its own clock. The offset between two
sources is chosen so that the numbers of requests in the system agree best. The search tries
multiples of 15 minutes first (time zones), then seconds (clock skew).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.core.errors import InputError
from simkv.incident.evidence import (
    Evidence,
    StatedSetting,
    sum_over_ranks,
    tables,
)
from simkv.incident.log_lines import HALF_A_YEAR

Floats = npt.NDArray[np.float64]
QUARTER = 900.0
#: Maximum difference in hours between two clocks due to time zones.
MAX_ZONE_HOURS = 14
#: Maximum number of offsets to try for a client without a wall clock.
MAX_OFFSETS = 4000
#: Number of points that the curve of a source needs, and the fraction of them that must overlap.
MIN_SHAPE_POINTS, MIN_OVERLAP = 4, 0.5
DAY = 86400.0
YEAR = 365 * DAY
#: Maximum clock skew that is searched, and minimum skew that is reported (s).
MAX_SKEW_S, MIN_SKEW_S = 120.0, 2.0


def join(parts: Sequence[Evidence]) -> Evidence:
    """Join the evidence of all sources.

    All times are converted to the clock of the source with the best data on requests. Raises
    InputError if the sources are from two engines.
    """
    engines = {part.engine: part.source for part in parts if part.engine}
    if len(engines) > 1:
        (one, source), (other, beside), *_ = engines.items()
        raise InputError(
            f"{source} was written by {one}, but {beside} by {other}; expected files of one engine"
        )
    _check_one_server(parts)
    main = _main(parts)
    notes = [note for part in parts for note in part.notes]
    moved = []
    reference = _reference(parts) if main is None else None
    for part in parts:
        shift = _shift(part, main) if main is not None and part is not main else 0.0
        if reference is not None and part is not reference and part.series is not None:
            shift = _shift_by_shape(part, reference)
            notes.append(
                f"{part.source}: its times were shifted by {_within_years(shift):+.0f} s to match "
                f"{reference.source}"
            )
        if main is not None and abs(within := _within_years(shift)) > MIN_SKEW_S:
            notes.append(
                f"{part.source}: its clock was shifted by {within:+.0f} s to match {main.source}"
            )
        moved.append(_moved(part, shift))
    return Evidence(
        ", ".join(part.source for part in parts),
        wall=main.wall if main else True,
        engine=next(iter(engines), None),
        settings=_settings(parts, notes),
        requests=_requests(moved, notes),
        arrivals=_concat(moved, "arrivals"),
        access=_concat(moved, "access"),
        series=_concat(moved, "series"),
        steps=_concat(moved, "steps"),
        histograms={key: value for part in moved for key, value in part.histograms.items()},
        died=next((part.died for part in parts if part.died), None),
        notes=tuple(notes),
        lacks=tuple(dict.fromkeys(lack for part in parts for lack in part.lacks)),
    )


def _check_one_server(parts: Sequence[Evidence]) -> None:
    """Raise InputError if two logs have statistics lines of the same engine at the same times.

    Logs of several ranks have different engine numbers, and parts of one log follow each other.
    """
    logs = [part for part in parts if part.series is not None and part.wall and not part.histograms]
    for place, one in enumerate(logs):
        for other in logs[place + 1 :]:
            pair = [part.series for part in (one, other) if part.series is not None]
            shared = {*pair[0]["engine"]} & {*pair[1]["engine"]}
            begin = max(float(series["t_s"].min()) for series in pair)
            end = min(float(series["t_s"].max()) for series in pair)
            if shared and end > begin:
                raise InputError(
                    f"{one.source} and {other.source}: both have statistics lines of the same "
                    "engine at the same times, so they are from two servers; expected files of one "
                    "server. Diagnose each log separately"
                )


def _reference(parts: Sequence[Evidence]) -> Evidence | None:
    """Return the source with scraped metrics, for its clock, or None.

    The source is used if no source has data on single requests and another has statistics over
    time.
    """
    found = [part for part in parts if part.histograms and part.series is not None]
    others = [part for part in parts if not part.histograms and part.series is not None]
    return found[0] if found and others else None


def _shift_by_shape(part: Evidence, reference: Evidence) -> float:
    """Return the seconds to add to the times of ``part``, from the numbers of requests in the
    system.

    If there are too few scrapes to compare, ``part`` is moved into the time of the scrapes.
    """
    at, present = _present(part)
    other_at, other = _present(reference)
    if len(other_at) < MIN_SHAPE_POINTS or len(at) < MIN_SHAPE_POINTS:
        years = _years(float(at[0]), float(other_at[0]))
        quarters = np.arange(-4 * MAX_ZONE_HOURS, 4 * MAX_ZONE_HOURS + 1) * QUARTER

        def outside(shift: float) -> float:
            moved = at + years + shift
            return float(((moved < other_at[0]) | (moved > other_at[-1])).mean())

        best = float(min(sorted(quarters, key=abs), key=outside))
        return years + best if outside(best) < 1 else float(other_at[0] - at[0])

    def difference(shift: float) -> float:
        moved = at + shift
        inside = (moved >= other_at[0]) & (moved <= other_at[-1])
        if inside.sum() < MIN_OVERLAP * min(len(at), len(other_at)):
            return float("inf")
        apart = np.abs(np.interp(moved[inside], other_at, other) - present[inside]).sum()
        return float(apart + present[~inside].sum()) / len(at)

    step = max(float(np.median(np.diff(other_at))) / 2, 1.0)
    low, high = other_at[0] - at[-1], other_at[-1] - at[0]
    count = min(int((high - low) / step) + 2, MAX_OFFSETS)
    coarse = np.linspace(low, high, count)
    first = float(min(coarse, key=difference))
    width = float(coarse[1] - coarse[0])
    return first + float(
        min(np.arange(-width, width + 0.5, 0.5), key=lambda more: difference(first + more))
    )


def _within_years(shift: float) -> float:
    """Remove whole years from a shift between two clocks, for a log without a year."""
    if abs(shift) <= HALF_A_YEAR:
        return shift
    rest = shift - round(shift / YEAR) * YEAR
    return rest - round(rest / DAY) * DAY


def _main(parts: Sequence[Evidence]) -> Evidence | None:
    """Return the source with the most information about requests, or None."""
    with_requests = [part for part in parts if part.requests is not None]
    return max(with_requests, key=_worth, default=None)


def _worth(part: Evidence) -> tuple[int, int, int]:
    assert part.requests is not None
    queued = int(part.requests["queue_ms"].notna().sum())
    return queued, int(part.wall), len(part.requests)


def _concat(parts: Sequence[Evidence], name: str) -> pd.DataFrame | None:
    found = tables(parts, name)
    if not found:
        return None
    return pd.concat(found).sort_values("t_s", kind="stable", ignore_index=True)


def _settings(parts: Sequence[Evidence], notes: list[str]) -> dict[str, StatedSetting]:
    """Merge all settings. The first source has precedence, and conflicts are added to ``notes``."""
    found: dict[str, StatedSetting] = {}
    for part in parts:
        for name, known in part.settings.items():
            first = found.setdefault(name, known)
            if first.value != known.value:
                notes.append(
                    f"{name} is {first.value} in {first.where} but {known.value} in {known.where}; "
                    "the first value is used"
                )
    return found


def _moved(part: Evidence, shift: float) -> Evidence:
    if not shift:
        return part
    changed: dict[str, Any] = {}
    for name in ("requests", "arrivals", "access", "series", "steps"):
        table = getattr(part, name)
        if table is not None:
            times = [column for column in ("t_s", "from_s") if column in table]
            changed[name] = table.assign(**{column: table[column] + shift for column in times})
    return replace(part, **changed)


def _requests(parts: Sequence[Evidence], notes: list[str]) -> pd.DataFrame | None:
    """Return the requests of the best source, with the failed requests of the other sources."""
    main = _main(parts)
    if main is None:
        return None
    assert main.requests is not None
    found = [main.requests]
    for part in parts:
        if part is main or part.requests is None:
            continue
        missing = part.requests[part.requests["output_tokens"] == 0]
        both = len(part.requests) - len(missing)
        notes.append(
            f"{part.source}: {both} of its {len(part.requests)} requests are assumed to be in "
            f"{main.source}, too; {len(missing)} had no answer and are added"
        )
        found.append(missing)
    return pd.concat(found).sort_values("t_s", kind="stable", ignore_index=True)


def _shift(part: Evidence, main: Evidence) -> float:
    """Return the seconds to add to the times of ``part`` to match the clock of ``main``."""
    by_id = _by_id(part, main)
    if by_id is not None:
        return by_id
    at, present = _present(part)
    if not len(at):
        return 0.0
    other = _InSystem(main)
    if not (part.wall and main.wall):
        return _best(at, present, other, wall=False)
    years = _years(float(at[0]), float(other.starts[0])) if len(other.starts) else 0.0
    return years + _best(at + years, present, other, wall=True)


def _years(at: float, other: float) -> float:
    """Return the seconds from the year of a log without years to the year of another source."""
    if abs(at - other) < HALF_A_YEAR:
        return 0.0
    date, year = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(other, UTC).year
    moved = [_in_year(date, one).timestamp() for one in (year - 1, year, year + 1)]
    return min(moved, key=lambda time: abs(time - other)) - at


def _in_year(date: datetime, year: int) -> datetime:
    try:
        return date.replace(year=year)
    except ValueError:  # February 29
        return date.replace(year=year, day=28)


def _by_id(part: Evidence, main: Evidence) -> float | None:
    """Return the median time difference between requests with the same id in both sources, or
    None.
    """
    assert main.requests is not None
    named = part.arrivals if part.arrivals is not None else part.requests
    if named is None or "request" not in named or "request" not in main.requests:
        return None
    both = named.merge(main.requests, on="request", suffixes=("", "_main"))
    both = both[both["request"] != "None"]
    return float((both["t_s_main"] - both["t_s"]).median()) if len(both) else None


def _present(part: Evidence) -> tuple[Floats, Floats]:
    """Return the times, and the number of requests in the system at each time."""
    if part.series is not None:
        summed = sum_over_ranks(part.series)[["running", "waiting"]]
        return summed.index.to_numpy(np.float64), summed.sum(axis="columns").to_numpy(np.float64)
    if part.requests is not None:
        begin = part.requests["t_s"].to_numpy(np.float64)
        at = np.linspace(begin.min(), begin.max(), 200)
        return at, _InSystem(part)(at)
    return np.zeros(0), np.zeros(0)


class _InSystem:
    """Number of requests in the system at given times, from a source with requests."""

    def __init__(self, part: Evidence) -> None:
        assert part.requests is not None
        known = part.requests.dropna(subset=["e2e_ms"])
        self.starts = np.sort(known["t_s"].to_numpy(np.float64))
        self.ends = np.sort((known["t_s"] + known["e2e_ms"] / 1e3).to_numpy(np.float64))

    def __call__(self, at: Floats) -> Floats:
        began = np.searchsorted(self.starts, at, "right")
        return np.asarray(began - np.searchsorted(self.ends, at, "right"), np.float64)


def _best(at: Floats, present: Floats, other: _InSystem, *, wall: bool) -> float:
    """Return the offset with the smallest mean difference. Ties go to the smallest offset."""
    if not len(other.starts):
        return 0.0

    def difference(shift: float) -> float:
        return float(np.abs(other(at + shift) - present).mean())

    if wall:
        quarters = np.arange(-4 * MAX_ZONE_HOURS, 4 * MAX_ZONE_HOURS + 1) * QUARTER
        coarse = [float(shift) for shift in sorted(quarters, key=abs)]
    else:
        low, high = other.starts[0] - at[-1], other.ends[-1] - at[0]
        coarse = np.linspace(low, high, MAX_OFFSETS).tolist()
    first = min(coarse, key=difference)
    step = QUARTER if wall else max((coarse[-1] - coarse[0]) / MAX_OFFSETS, 1.0)
    around = min(MAX_SKEW_S, step)
    fine = sorted(np.arange(-around, around + 0.5, 0.5), key=abs)
    better = first + float(min(fine, key=lambda more: difference(first + more)))
    # A skew that hardly improves the match is ignored.
    return better if difference(better) < 0.9 * difference(first) else first
