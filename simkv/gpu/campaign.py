"""Measure the cost of steps and of parts of steps on this device.

A *point* is a step, or a part of a step, to measure. Points are ordered by usefulness and measured
twice, in shuffled order within small groups. A fixed step (the sentinel) is timed before each group
to show drift. Every measurement is appended to a CSV file at once, so an interrupted measurement
can be resumed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from simkv.core.errors import InputError
from simkv.gpu.campaign_plan import Probe, sentinel
from simkv.gpu.microbenchmark import Microbenchmark

#: Number of points between two sentinels.
POINTS_PER_SENTINEL = 20


class Measurement(NamedTuple):
    """Measured time of a step or a part of it: statistics of the repeats, in seconds.

    ``longest`` is the longest context of a decode. ``size`` is the padded size. ``at_s`` is the
    time since the first measurement, in seconds.
    """

    key: str
    passed: int
    part: str
    prefill_seqs: int
    prefill_tokens: int
    prefill_context: int
    decode_seqs: int
    decode_context: int
    prefill_pairs: int
    longest: int
    size: str
    median_s: float
    p10_s: float
    p90_s: float
    most_s: float
    repeats: int
    at_s: float


def measure(
    stand: Microbenchmark,
    points: Sequence[Probe],
    path: Path,
    budget_s: float,
    *,
    repeats: int = 20,
    passes: int = 2,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Measure ``points`` (steps and parts of steps) for at most ``budget_s`` seconds.

    Results are appended to the CSV file ``path``. Points that are already in the file are skipped.
    Return all measurements in the file.
    """
    begin = perf_counter()
    _drop_incomplete_line(path)
    done = {(sample.key, sample.passed) for sample in read_samples(path)}
    earlier = max((sample.at_s for sample in read_samples(path)), default=0.0)
    random = np.random.default_rng(seed)
    watch = sentinel(stand.limits)
    for start in range(0, len(points), POINTS_PER_SENTINEL):
        batch = points[start : start + POINTS_PER_SENTINEL]
        stand.forget()
        for passed in range(passes):
            order = [watch, *(batch[i] for i in random.permutation(len(batch)))]
            for index, point in enumerate(order):
                turn = passed if index else passed + passes * (start // POINTS_PER_SENTINEL)
                key = point.key if index else f"sentinel {point.key}"
                if (key, turn) in done:
                    continue
                if perf_counter() - begin > budget_s:
                    return read_samples(path)
                seconds = stand.time(point, repeats)
                at = earlier + perf_counter() - begin
                _append(path, _sample(stand, point, key, turn, seconds, at))
                progress()
    return read_samples(path)


def _sample(
    stand: Microbenchmark, point: Probe, key: str, passed: int, seconds: list[float], at: float
) -> Measurement:
    low, median, high = np.percentile(seconds, (10, 50, 90))
    longest = max(point.decodes, default=0)
    load = point.load
    size = "x".join(map(str, stand.size(point)))
    spread = (float(median), float(low), float(high), max(seconds))
    return Measurement(key, passed, point.part, *load[:6], longest, size, *spread, len(seconds), at)


def _append(path: Path, sample: Measurement) -> None:
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(Measurement._fields)
        writer.writerow(sample)


def _drop_incomplete_line(path: Path) -> None:
    """Drop the last line if its writing was interrupted."""
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def read_samples(path: Path) -> list[Measurement]:
    """Return all measurements in a file; empty if there is no file.

    Raises InputError if the file has other columns.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or tuple(rows[0]) != Measurement._fields:
        raise InputError(f"{path}: not a measurement file of this version of simkv")
    kinds = get_type_hints(Measurement).values()
    return [
        Measurement(*(kind(value) for kind, value in zip(kinds, row, strict=True)))
        for row in rows[1:]
    ]


def check_same(path: Path, about: dict[str, Any]) -> None:
    """Write the setup of a measurement to ``path``, or compare it with the setup written there.

    Raises InputError if the setups differ.
    """
    if not path.exists():
        path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    for name in ("shape", "limits", "device", "torch", "version", "clock"):
        if there.get(name) != about[name]:
            raise InputError(
                f"{path}: was measured with {name} {there.get(name)}, but {name} is now "
                f"{about[name]}; use another directory for --out"
            )


#: Ratio of the sentinel's change to its scatter above which the change is reported.
SIGNIFICANT_DRIFT = 3.0
#: A repeat counts as stalled if it exceeds this factor times the median of its point, and exceeds
#: the median by this time (s).
STALL_FACTOR, STALL_EXCESS_S = 3.0, 5e-3


def measure_drift(samples: Sequence[Measurement]) -> float:
    """Return the relative change of the sentinel's duration between the first and last measurement.

    The sentinel is a fixed step that is timed repeatedly. The change is taken from a linear fit. It
    is 0 if it does not exceed the scatter, or if there are fewer than four measurements.
    """
    seen = [(s.at_s, s.median_s) for s in samples if s.key.startswith("sentinel")]
    if len(seen) < 4:
        return 0.0
    at, seconds = np.array(seen).T
    slope, base = np.polyfit(at, seconds, 1)
    first, last = base + slope * at.min(), base + slope * at.max()
    scatter = float(np.std(seconds - (base + slope * at)))
    sure = abs(last - first) > SIGNIFICANT_DRIFT * scatter * (12 / len(seen)) ** 0.5
    return float(last / first - 1.0) if sure and first > 0 else 0.0


def count_stalled(samples: Sequence[Measurement]) -> int:
    """Return the number of measurements with a repeat that took much longer than the median."""
    return sum(
        s.most_s > max(STALL_FACTOR * s.median_s, s.median_s + STALL_EXCESS_S) for s in samples
    )
