"""Fit the widths of the sources of error to residuals of held-out measurements.

The way to hold out measurements determines which sources of error apply to each residual, because
it determines what was known for the prediction. All ways together determine the width of each
source. The end of an interval is the root of the sum of the squared widths of the sources that
apply. The widths minimize the pinball losses of all ends (the interval score).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

from dev.serving_points.constant_fit import Ladder, fold, left_out
from dev.serving_points.fit_samples import Residual
from simkv.costs.operators.configuration_kind import Configuration
from simkv.costs.operators.error_sources import (
    ErrorSources,
    Measured,
    MeasuredPair,
    applicable_sources,
    find_release_range,
    new_model_factor,
    protocol_factor,
)
from simkv.validation.serving_points.latency_gradients import Floats

#: Quantiles of log(measured / predicted) at the ends of an interval.
ENDS = (0.05, 0.95)
#: Sources that these measurements cannot show, because they come from one laboratory. Server: 26
#: results of ten servers of another laboratory (``dev.served_results``) need these ends beside the
#: other sources. They include step times of an H100 at its power limit, which were 4 % (decode) to
#: 17 % (prefill) above the composed ones (calibrate/h100-llama-3-8b).
ASSUMED = {"server": ((-0.35, 0.5), (-0.35, 0.35))}
#: Smallest widths of sources that the measurements hardly show. Release: a step became 4 to 6 %
#: faster from vLLM 0.19 to 0.28, and the square of the width grows with the number of releases.
#: Kernels: served gpt-oss-20b on an A100, whose kernels have no table, took 9 to 100 % longer.
SMALLEST = {
    "release": ((-0.017, 0.017), (-0.017, 0.017)),
    "kernels": ((-0.1, 0.3), (-0.1, 0.3)),
}
#: The scale of a class counts as this number of measurements in the scale of a configuration.
PRIOR = 10
#: Ways to hold out measurements, each with a function that returns the group of a measurement; a
#: whole group is held out.
WAYS: Mapping[str, Callable[[Residual], Hashable]] = {
    "configuration": fold,
    "pair": lambda s: s.group,
    "model": lambda s: s.kind.model,
    "source": lambda s: s.source,
    "family": lambda s: s.kind.family,
}


@dataclass(frozen=True)
class HeldOut:
    """Residuals of held-out measurements, by way and sample.

    ``logs`` is log(measured / predicted), shape (rows, 2): TTFT and TPOT. ``factors`` maps a source
    to the factors on the squares of its widths, of the same shape, 0 where it does not apply.
    ``samples`` are the indices of the rows' samples, ``ways`` the names of the rows' ways. ``new``
    is the factor on squares in predictions for models that were not measured.
    """

    logs: Floats
    factors: Mapping[str, Floats]
    samples: Any
    ways: Any
    new: Floats

    def only(self, rows: Any) -> HeldOut:
        """Return a selection of the rows."""
        chosen = {name: values[rows] for name, values in self.factors.items()}
        return HeldOut(self.logs[rows], chosen, self.samples[rows], self.ways[rows], self.new[rows])

    def of(self, way: str) -> HeldOut:
        """Return the rows of a way, one per sample in their order."""
        return self.only(self.ways == way)


def hold_out(samples: Sequence[Residual], ladder: Ladder, ways: Iterable[str] = WAYS) -> HeldOut:
    """Predict each sample without its part, for each way."""
    own = left_out(samples, ladder, WAYS["configuration"])
    logs, rows, numbers, names, new = [], [], [], [], []
    for way in ways:
        part_of = WAYS[way]
        logs.append(left_out(samples, ladder, part_of))
        applied, factors = applicable(samples, own, way)
        rows += applied
        new += factors
        numbers += list(range(len(samples)))
        names += [way] * len(samples)
    sources = sorted({name for row in rows for name in row})
    table = {name: np.array([row.get(name, (0.0, 0.0)) for row in rows]) for name in sources}
    return HeldOut(np.concatenate(logs), table, np.array(numbers), np.array(names), np.array(new))


def applicable(
    samples: Sequence[Residual], own: Floats, way: str
) -> tuple[list[dict[str, tuple[float, float]]], list[float]]:
    """Return the sources of error that apply to each sample in a way of holding out, and the
    factors for models that were not measured.

    ``own`` are the residuals of samples of measured pairs, with their configurations held out.
    """
    parts = [WAYS[way](sample) for sample in samples]
    found: list[dict[str, tuple[float, float]]] = [{} for _ in samples]
    new = [1.0] * len(samples)
    for part in dict.fromkeys(parts):
        known = [i for i, other in enumerate(parts) if other != part]
        measured = measure([samples[i] for i in known], own[known])
        for i in (i for i, other in enumerate(parts) if other == part):
            sample = samples[i]
            new[i] = new_model_factor(measured, sample.kind)
            found[i] = applicable_sources(
                measured, sample.kind, sample.release, kernels=sample.unmeasured
            )
            if way == "source" and sample.kind in measured.pairs:
                found[i][f"host of {sample.kind.backend}"] = (1.0, 1.0)
            if found[i] and sample.concurrency:
                found[i]["protocol"] = (protocol_factor(sample.concurrency),) * 2
    return found, new


def measure(samples: Sequence[Residual], own: Floats) -> Measured:
    """Return the measured configurations; their scales are relative to their class.

    A scale is the mean absolute residual of a configuration over that of its class, drawn towards 1
    as if by ``PRIOR`` further measurements.
    """
    sizes = np.abs(own)
    classes: dict[str, list[int]] = {}
    pairs: dict[Configuration, list[int]] = {}
    for i, sample in enumerate(samples):
        classes.setdefault(sample.kind.class_name, []).append(i)
        pairs.setdefault(sample.kind, []).append(i)
    found = {}
    for kind, rows in pairs.items():
        ratio = sizes[rows].mean(axis=0) / sizes[classes[kind.class_name]].mean(axis=0)
        ttft, tpot = (len(rows) * ratio + PRIOR) / (len(rows) + PRIOR)
        releases = find_release_range(samples[i].release for i in rows)
        found[kind] = MeasuredPair(releases, (round(float(ttft), 3), round(float(tpot), 3)))
    return Measured(found)


def fit_widths(found: HeldOut) -> dict[str, Floats]:
    """Return the widths of each source, shape (2 latencies, 2 ends), all at least 0."""
    names = list(found.factors)
    widths = np.zeros((len(names), 2, 2))
    for latency in range(2):
        for end, quantile in enumerate(ENDS):
            sign = -1.0 if end == 0 else 1.0
            logs = sign * found.logs[:, latency]
            table = np.array([found.factors[name][:, latency] for name in names])
            level = max(quantile, 1 - quantile)
            widths[:, latency, end] = _fit_end(logs, table, level)
    return {name: widths[i] for i, name in enumerate(names)}


def _fit_end(logs: Floats, table: Floats, level: float) -> Floats:
    """Return the widths that minimize the pinball loss of ``logs`` at a quantile above one half.

    ``table`` has the factors on the squared widths, shape (sources, rows).
    """

    def loss(values: Floats) -> tuple[float, Floats]:
        ends = np.sqrt((values**2) @ table + 1e-8)
        weights = np.where(logs > ends, level, level - 1)
        gradient = -(table @ (weights / ends)) * values / len(logs)
        return float((weights * (logs - ends)).mean()), gradient

    start = max(float(np.quantile(logs, level)), 0.01)
    found = minimize(loss, np.full(len(table), start), jac=True, method="L-BFGS-B")
    return np.asarray(np.abs(found.x))


def fit_sources(
    samples: Sequence[Residual], found: HeldOut, provenance: Mapping[str, Any]
) -> ErrorSources:
    """Return the content of ``error_sources.json``; ``found`` has all ways."""
    widths = fit_widths(found)
    ends = interval_ends(widths, found.factors)
    half = (ends[:, :, 1] - ends[:, :, 0]) / 2
    typical = np.median(np.abs(np.expm1(-found.logs)) / np.maximum(half, 1e-9), axis=0)
    signed = {
        name: tuple((round(-float(low), 4), round(float(high), 4)) for low, high in width)
        for name, width in widths.items()
    }
    larger = {
        name: tuple(
            (min(low, *least), max(high, *least))
            for (low, high), least in zip(signed.get(name, ends), ends, strict=True)
        )
        for name, ends in SMALLEST.items()
    }
    return ErrorSources(
        measure(samples, found.of("configuration").logs),
        {name: (ttft, tpot) for name, (ttft, tpot) in (signed | larger | ASSUMED).items()},
        (round(float(typical[0]), 3), round(float(typical[1]), 3)),
        provenance,
    )


def left_out_ends(
    samples: Sequence[Residual],
    found: HeldOut,
    own: HeldOut,
    part_of: Callable[[Residual], Hashable],
) -> Floats:
    """Return the interval ends of each row of ``own``; there is one row per sample.

    For a part of the samples, the widths are fitted to all rows of ``found`` except the rows of
    these samples. The ends are logarithms, shape (samples, 2 latencies, 2 ends), and NaN if no
    other part has measurements of the engine.
    """
    ends = np.full((len(samples), 2, 2), np.nan)
    parts = [part_of(sample) for sample in samples]
    for part in dict.fromkeys(parts):
        inside = np.array([other == part for other in parts])
        rest = found.only(~inside[found.samples])
        if len(rest.logs):
            given = own.only(inside)
            fitted = interval_ends(fit_widths(rest), given.factors)
            ends[inside] = fitted * np.sqrt(given.new)[:, None, None]
    known = np.asarray(sum(own.factors.values()))[:, 0] > 0
    return np.where(known[:, None, None], ends, np.nan)


def interval_ends(widths: Mapping[str, Floats], factors: Mapping[str, Floats]) -> Floats:
    """Return the ends of log(measured / predicted), shape (rows, 2 latencies, 2 ends)."""
    squares = sum(
        values[:, :, None] * widths[name][None] ** 2
        for name, values in factors.items()
        if name in widths
    )
    return np.asarray(np.sqrt(np.asarray(squares)) * np.array([-1.0, 1.0]))
