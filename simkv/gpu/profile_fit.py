"""Fit a cost profile to measurements, with its error on held-out steps.

    step = rest[tokens] + decode attention + prefill attention (+ a constant in mixed steps)
           all scaled, + cost of a whole step beyond its parts, in isolation and in service + host

``rest`` is a table over the padded sizes of steps; other sizes are interpolated linearly. The time
of attention is linear in a few features. For decodes, the features are the tokens of context, the
batch size, and the excess of the longest context over the mean. For prefills, the feature is the
number of attention pairs. The coefficients are non-negative and minimize relative errors. The
difference between a whole step and its parts may be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError
from scipy.optimize import nnls

from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    Feature,
    FitQuality,
    LinearPiece,
    StepCost,
    StepError,
    StepFilter,
)
from simkv.costs.cost_terms import compute_feature
from simkv.costs.held_out_errors import summarize_errors_by_kind
from simkv.costs.scaled_executor import classify_step
from simkv.costs.step_load import StepLoad
from simkv.gpu.campaign import Measurement
from simkv.gpu.graph_buckets import decode_bucket, token_bucket
from simkv.gpu.whole_step import (
    KINDS,
    constant_term,
    device_profile,
    fit_whole_steps,
    is_host_term,
    scaled_term,
)

Floats = npt.NDArray[np.float64]
#: Parts of steps whose times the terms describe.
FITTED = ("rest", "decode", "mixed decode", "prefill")


class HostCosts(NamedTuple):
    """Host time in seconds: per step, per decoding sequence, per idle pass and per step with
    prefills.
    """

    step_s: float
    sequence_s: float
    idle_s: float
    prefill_s: float = 0.0


class RealStep(NamedTuple):
    """A step of a real run, with its load, its total time and its device time (s)."""

    load: StepLoad
    seconds: float
    device_s: float


@dataclass(frozen=True)
class MedianPass:
    """Measured step or part of a step, with the median of all its measurements in seconds."""

    sample: Measurement
    seconds: float

    @property
    def load(self) -> StepLoad:
        s = self.sample
        return StepLoad(
            s.prefill_seqs,
            s.prefill_tokens,
            s.prefill_context,
            s.decode_seqs,
            s.decode_context,
            s.prefill_pairs,
            longest=s.longest,
        )

    @property
    def slots(self) -> int:
        """Number of token slots of the padded step."""
        return int(self.sample.size.split("x")[0])


def points_by_part(samples: Sequence[Measurement]) -> dict[str, list[MedianPass]]:
    """Return the measurements, grouped by the measured part of the step.

    Repeated measurements are replaced by their median. The steps that are repeated to detect drift
    are left out.
    """
    groups: dict[str, list[Measurement]] = {}
    for sample in samples:
        if not sample.key.startswith("sentinel"):
            groups.setdefault(sample.key, []).append(sample)
    parts: dict[str, list[MedianPass]] = {}
    for group in groups.values():
        found = MedianPass(group[0], median(s.median_s for s in group))
        parts.setdefault(found.sample.part, []).append(found)
    return parts


def fit_profile(
    samples: Sequence[Measurement],
    host: HostCosts,
    *,
    name: str,
    model: str,
    gpu: str,
    source: list[str],
) -> CostProfile:
    """Fit a profile of single steps in isolation to the measurements.

    Half of the whole steps are used for the fit, and the other half for the error. Raises
    ValueError if a part of the step was not measured, or if a step would take no time.
    """
    parts = points_by_part(samples)
    for part in ("rest", "decode", "prefill"):
        if not parts.get(part):
            raise ValueError(
                f"part {part!r} was not measured in the given time; use a longer --budget"
            )
    decoding = [p for p in parts["rest"] if not p.load.prefill_seqs]
    prefilling = [p for p in parts["rest"] if not p.load.decode_seqs]
    both = [p for p in parts["rest"] if p.load.prefill_seqs and p.load.decode_seqs]
    if not decoding or not prefilling:
        raise ValueError(
            "the measurements contain too few kinds of steps without attention: expected steps "
            "with only decodes and steps with only prefills; use a longer --budget"
        )
    terms = [
        CostTerm(
            name="all but attention, decodes",
            feature="decode_seqs",
            when="pure decode",
            pieces=_stairs(decoding, decode_bucket),
        ),
        CostTerm(
            name="all but attention, prefills",
            feature="tokens",
            when="prefill",
            pieces=_stairs(prefilling, token_bucket),
        ),
        *_of_decodes(parts["decode"], parts.get("mixed decode", [])),
        *_lines(
            "prefill attention",
            "prefill",
            parts["prefill"],
            ["prefill_pairs", "prefill_tokens", "prefill_seqs", "prefill_mean"],
        ),
        constant_term("more rows to sample", _mixed_extra(both, prefilling), "mixed"),
        CostTerm(name="host, per step", feature="steps", seconds=host.step_s),
        CostTerm(
            name="host, per sequence that decodes", feature="decode_seqs", seconds=host.sequence_s
        ),
        CostTerm(
            name="host, per step with prefills",
            feature="steps",
            when="prefill",
            seconds=host.prefill_s,
        ),
    ]
    fitted = [p for part in FITTED for p in parts.get(part, [])]
    profile = CostProfile(
        name=name,
        engine="simkv gpu",
        model=model,
        gpu=gpu,
        basis="measured",
        terms=terms,
        idle_pass_s=host.idle_s,
        range=_range(fitted + parts.get("step", [])),
        fit=FitQuality(
            points=len(fitted),
            note="classes measured apart; what whole steps cost beyond their sum is from half of "
            "the whole steps, the error from the other half, on the device alone",
        ),
        source=source,
    )
    seen, unseen = halves(parts.get("step", []))
    profile = profile.model_copy(
        update={"terms": fit_whole_steps(profile, [(s.load, s.seconds) for s in seen], WHOLE)}
    )
    cost = StepCost(device_profile(profile))
    return _with_error(profile, cost, [(step.load, step.seconds) for step in unseen])


def fit_synchronous(
    profile: CostProfile, real: Sequence[RealStep], judged: Sequence[RealStep]
) -> CostProfile:
    """Return the profile of a synchronous engine, whose steps take the device time plus the host
    time.

    ``profile`` is a profile of steps in isolation. The device time in service is fitted to
    the steps ``real`` of a real run. The error of the profile is computed from the steps ``judged``
    of other runs.
    """
    terms = fit_whole_steps(profile, [(s.load, s.device_s) for s in real], SERVICE)
    return _judged(profile.model_copy(update={"terms": terms}), judged)


def _judged(profile: CostProfile, judged: Sequence[RealStep]) -> CostProfile:
    """Return the profile with its error, measured on steps of real runs."""
    note = (
        "classes measured apart; what whole steps cost beyond their sum is from half of the whole "
        "steps and from one real run, the error from others of other load and sizes, host and "
        "device"
    )
    fit = profile.fit.model_copy(update={"note": note})
    profile = profile.model_copy(update={"fit": fit})
    return _with_error(profile, StepCost(profile), [(s.load, s.seconds) for s in judged])


def _with_error(
    profile: CostProfile,
    cost: Callable[[StepLoad], float],
    steps: Sequence[tuple[StepLoad, float]],
) -> CostProfile:
    """Return the profile with the error of ``cost`` on the held-out ``steps``."""
    error = {"held_out": relative_step_errors(cost, steps), "rms_s": _rms(cost, steps)}
    return _checked(profile.model_copy(update={"fit": profile.fit.model_copy(update=error)}))


def _checked(profile: CostProfile) -> CostProfile:
    """Return the validated profile. Raises ValueError if it is invalid."""
    try:
        return CostProfile.model_validate(profile.model_dump())
    except ValidationError as error:
        raise ValueError(
            f"the fit does not give a valid profile: {error.errors()[0]['msg']}"
        ) from error


#: Names of two constants: the excess of whole steps over their parts, and the excess of steps in
#: service over steps in isolation.
WHOLE, SERVICE = "whole steps beyond their parts", "service"
#: Minimum number of steps for fitting a term of the overlapped profile to their total time.
MIN_STEPS = 20


def fit_overlapped(
    profile: CostProfile, real: Sequence[RealStep], judged: Sequence[RealStep]
) -> CostProfile:
    """Return the profile of a pipelined engine, whose steps take the longer of device and host
    time.

    ``profile`` is a profile of steps in isolation. The device and host times are fitted to
    the steps ``real`` of a pipelined run. The error of the profile is computed from the steps
    ``judged`` of other pipelined runs.
    """
    device = device_profile(profile)
    cost = StepCost(device)
    host = [term for term in profile.terms if is_host_term(term)]
    floor = StepCost(profile.model_copy(update={"terms": host}))
    behind = [step for step in real if floor(step.load) >= cost(step.load)]
    if len(behind) >= MIN_STEPS:
        share = median(step.seconds / floor(step.load) for step in behind)
        host = [scaled_term(term, share) for term in host]
        floor = StepCost(profile.model_copy(update={"terms": host}))
    steps = []
    for _, prefills in KINDS:
        alike = [step for step in real if bool(step.load.prefill_seqs) is prefills]
        waiting = [step for step in alike if cost(step.load) > 1.1 * floor(step.load)]
        if len(waiting) >= MIN_STEPS:
            steps += [(step.load, step.seconds) for step in waiting]
        else:
            steps += [(step.load, step.device_s) for step in alike]
    terms = fit_whole_steps(device, steps, f"overlapped {SERVICE}")
    update = {"name": f"{profile.name}-overlapped", "terms": terms, "floor": host}
    return _judged(profile.model_copy(update=update), judged)


def halves(steps: Sequence[MedianPass]) -> tuple[list[MedianPass], list[MedianPass]]:
    """Split the steps into two halves. The steps of each kind go alternately to either half."""
    ordered = sorted(steps, key=lambda step: (classify_step(step.load), step.sample.key))
    return ordered[::2], ordered[1::2]


#: Features that determine the attention cost of decodes.
DECODE_FEATURES: list[Feature] = ["decode_context", "decode_seqs", "decode_mean", "decode_tail"]


def _of_decodes(alone: Sequence[MedianPass], beside: Sequence[MedianPass]) -> list[CostTerm]:
    """Return the cost terms of decode attention, in isolation and in steps with prefills.

    With too few measurements in steps with prefills, the terms in isolation are used for all steps.
    """
    if len(beside) <= len(DECODE_FEATURES):
        return _lines("decode attention", "decode", alone, DECODE_FEATURES)
    return [
        *_lines("decode attention", "pure decode", alone, DECODE_FEATURES),
        *_lines("decode attention beside prefills", "mixed", beside, DECODE_FEATURES),
    ]


def relative_step_errors(
    cost: Callable[[StepLoad], float], steps: Sequence[tuple[StepLoad, float]]
) -> dict[str, StepError]:
    """Return the relative errors of predicted step times, by kind of step and over all steps."""
    return summarize_errors_by_kind(
        (kind, cost(load) / seconds - 1.0)
        for load, seconds in steps
        for kind in (classify_step(load), "all")
    )


def _rms(
    cost: Callable[[StepLoad], float], steps: Sequence[tuple[StepLoad, float]]
) -> float | None:
    gaps = [cost(load) - seconds for load, seconds in steps]
    return float(np.sqrt(np.mean(np.square(gaps)))) if gaps else None


def _stairs(points: Sequence[MedianPass], padded: Callable[[int], int]) -> list[LinearPiece]:
    """Return a piecewise linear function over the padded sizes.

    Beyond the largest measured size, the cost is proportional to the size.
    """
    by_size = {p.slots: p.seconds for p in points}
    measured = sorted(by_size)
    sizes = [measured[0]]
    while sizes[-1] < measured[-1]:
        sizes.append(padded(sizes[-1] + 1))
    heights = np.interp(sizes, measured, [by_size[size] for size in measured])
    pieces = [LinearPiece(up_to=s, base=float(h)) for s, h in zip(sizes, heights, strict=True)]
    return [*pieces, LinearPiece(base=0.0, slope=by_size[measured[-1]] / measured[-1])]


def _lines(
    name: str, when: StepFilter, points: Sequence[MedianPass], features: Sequence[Feature]
) -> list[CostTerm]:
    """Fit a constant and a non-negative slope per feature, by least squares of relative errors."""
    columns: list[Feature] = ["steps", *features]
    found = fit_nonnegative([[_value(p.load, f) for f in columns] for p in points], points)
    return [
        CostTerm(name=f"{name}, {feature}", feature=feature, when=when, seconds=float(seconds))
        for feature, seconds in zip(columns, found, strict=True)
    ]


def fit_nonnegative(rows: Sequence[Sequence[float]], points: Sequence[MedianPass]) -> Floats:
    """Return non-negative coefficients ``x`` that minimize the relative error of ``rows @ x``
    compared with the measured seconds.
    """
    seconds = np.array([p.seconds for p in points])
    matrix = np.array(rows, dtype=np.float64) / seconds[:, None]
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0.0] = 1.0
    solution, _ = nnls(matrix / scale, np.ones(len(points)))
    return np.asarray(solution / scale, dtype=np.float64)


def _value(load: StepLoad, feature: Feature) -> float:
    return float(compute_feature(load, feature))


def _mixed_extra(both: Sequence[MedianPass], prefilling: Sequence[MedianPass]) -> float:
    """Return the median additional cost of a step with prefills if it also has decodes."""
    alone = {p.slots: p.seconds for p in prefilling}
    extra = [p.seconds - alone[p.slots] for p in both if p.slots in alone]
    return median(extra) if extra else 0.0


def _range(points: Sequence[MedianPass]) -> dict[Feature, tuple[float, float]]:
    features: list[Feature] = [
        "prefill_tokens",
        "prefill_context",
        "decode_seqs",
        "decode_context",
        "decode_tail",
    ]
    found: dict[Feature, tuple[float, float]] = {}
    for feature in features:
        values = [value for p in points if (value := _value(p.load, feature))]
        if values:
            found[feature] = (min(values), max(values))
    return found
