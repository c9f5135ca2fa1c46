"""Sources of error of composed costs: which sources apply, and how much each adds to an interval.

Sources of error are, for example, unmeasured kernels or an unmeasured model. The width of a source
is an interval of log(measured / predicted) that contains 90 % of the measurements if no other
source applies. The sources are independent, so the squares of their interval ends are added.
``error_sources.json`` contains the widths and the measured configurations. ``make
calibrate-silicon`` fits the widths to predictions of held-out measurements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.core.engine_version import count_releases, find_version, parse_version
from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.cost_profile import CostProfile, ErrorSource, FitQuality, StepCost, StepError
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.composition import UNKNOWN_ERROR
from simkv.costs.operators.configuration_kind import Configuration, classify_configuration
from simkv.costs.operators.roofline import estimate_errors
from simkv.costs.profile_uncertainty import combine_ends, error_ends
from simkv.costs.step_load import StepLoad, count_attention_pairs
from simkv.schedulers.engine_registry import ENGINES

SOURCES_PATH = Path(__file__).with_name("error_sources.json")
#: Sources that apply to every prediction for a user's server: its clocks, power limit, drivers and
#: client differ from those of the measurements.
ALWAYS = ("server",)
#: Description of a source: what was not measured if the source applies.
UNMEASURED = {name: name for name in ("model", "kernels", "release", "link")}
UNMEASURED["data sheet"] = "GPU"
#: Smallest spread of experts' times, as a logarithm, at which the kernel counts as unknown.
MIN_SPREAD = math.log(1.1)
#: Steps for which the spread of experts' times is converted to a spread of step times.
SPREAD_PROMPT, SPREAD_SEQS = 1024, 32
#: Maximum number of releases that count.
MAX_RELEASES = 10
#: Kinds of steps to which the latencies TTFT and TPOT refer.
STEP_KINDS = {"prefill": 0, "mixed": 0, "decode": 1}


@dataclass(frozen=True)
class MeasuredPair:
    """First and last engine release on which a configuration was measured, and its error.

    ``scale`` is the error for TTFT and for TPOT, divided by the error of configurations with the
    same engine and the same kind of MLP.
    """

    releases: tuple[str, str]
    scale: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Measured:
    """Configurations that were measured, with data about each of them."""

    pairs: Mapping[Configuration, MeasuredPair]

    def beyond(self, kind: Configuration, release: str) -> int:
        """Return the number of releases between ``release`` and the nearest measured release.

        The number is 0 if a release is unknown.
        """
        part = ENGINES[kind.backend].release_part if kind.backend in ENGINES else 1
        engine = [(o, p.releases) for o, p in self.pairs.items() if o.backend == kind.backend]
        family = [(o, ends) for o, ends in engine if o.family == kind.family]
        own = [(o, ends) for o, ends in family if o == kind]
        apart = [
            max(count_releases(release, first, part), count_releases(last, release, part), 0)
            for _, (first, last) in own or family or engine
            if first
        ]
        return min(*apart, MAX_RELEASES) if apart and find_version(release) else 0


def find_release_range(names: Iterable[str]) -> tuple[str, str]:
    """Return the first and the last release in ``names``, or empty texts if no release is known."""
    known = sorted(filter(find_version, names), key=parse_version)
    return (known[0], known[-1]) if known else ("", "")


def applicable_sources(
    measured: Measured, kind: Configuration, release: str, *, kernels: bool
) -> dict[str, tuple[float, float]]:
    """Return the sources of error of a configuration, each with two factors.

    The factors for TTFT and for TPOT multiply the square of the width. ``kernels`` is true if some
    kernels were not measured on the GPU. The result is empty if the engine was not measured.
    """
    if all(other.backend != kind.backend for other in measured.pairs):
        return {}
    own = measured.pairs.get(kind)
    ttft, tpot = own.scale if own else (1.0, 1.0)
    found = {f"costs of {kind.class_name}": (ttft**2, tpot**2)}
    if own is None:
        found["model"] = (1.0, 1.0)
    if kernels:
        found["kernels"] = (1.0, 1.0)
    if beyond := measured.beyond(kind, release):
        found["release"] = (float(beyond), float(beyond))
    return found


def new_model_factor(measured: Measured, kind: Configuration) -> float:
    """Return the factor for the squares of all widths.

    The factor is 1 + 1 / n for a model that is not among the n measured models, and 1 for a
    measured model.
    """
    if kind in measured.pairs:
        return 1.0
    models = {other.model for other in measured.pairs if other.backend == kind.backend}
    return 1.0 + 1.0 / max(len(models), 1)


def protocol_factor(concurrency: int) -> float:
    """Return the factor for the squared width of ``protocol``. The factor grows with concurrency.

    ``protocol`` is the error from an unknown number of requests per client. All clients start at
    once. The effect of this initial burst on the mean TTFT depends on the unknown number.
    """
    return math.log1p(concurrency / 64) ** 2


@dataclass(frozen=True)
class ErrorSources:
    """Content of ``error_sources.json``.

    ``widths`` contains the interval ends of each source of error, for TTFT and for TPOT.
    ``typical`` is the median absolute error divided by half the width, for TTFT and for TPOT.
    """

    measured: Measured
    widths: Mapping[str, tuple[tuple[float, float], tuple[float, float]]]
    typical: tuple[float, float]
    provenance: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "provenance": dict(self.provenance),
            "typical": list(self.typical),
            "widths": {name: [list(one) for one in ends] for name, ends in self.widths.items()},
            "measured": [
                {**asdict(kind), **asdict(pair)}
                for kind, pair in sorted(self.measured.pairs.items())
            ],
        }

    def find(self, kind: Configuration, release: str, *, kernels: bool) -> list[ErrorSource]:
        """Return the sources of error of a configuration, each with its interval ends by kind of
        step.

        The result is empty if the engine was not measured.
        """
        applicable = applicable_sources(self.measured, kind, release, kernels=kernels)
        new = new_model_factor(self.measured, kind)
        applicable = {n: (new * ttft, new * tpot) for n, (ttft, tpot) in applicable.items()}
        applicable |= dict.fromkeys(ALWAYS, (1.0, 1.0)) if applicable else {}
        if kind in self.measured.pairs:  # the constants of this configuration come from other hosts
            applicable[f"host of {kind.backend}"] = (1.0, 1.0)
        return [
            ErrorSource(
                name=name.partition(" of ")[0],
                ends={
                    step: _scaled(self.widths[name][i], factors[i])
                    for step, i in STEP_KINDS.items()
                },
            )
            for name, factors in applicable.items()
            if name in self.widths
        ]


def _scaled(ends: tuple[float, float], factor: float) -> tuple[float, float]:
    return round(ends[0] * math.sqrt(factor), 4), round(ends[1] * math.sqrt(factor), 4)


def read_sources(path: Path = SOURCES_PATH) -> ErrorSources:
    """Read the sources of error from a file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    measured = {}
    for row in data["measured"]:
        (first, last), (ttft, tpot) = row.pop("releases"), row.pop("scale")
        measured[Configuration(**row)] = MeasuredPair((first, last), (ttft, tpot))
    widths = {name: (tuple(ttft), tuple(tpot)) for name, (ttft, tpot) in data["widths"].items()}
    ttft, tpot = data["typical"]
    return ErrorSources(Measured(measured), widths, (ttft, tpot), data["provenance"])


@lru_cache(maxsize=1)
def packaged_sources() -> ErrorSources:
    """Return the sources of error packaged with simkv."""
    return read_sources()


def add_error_sources(
    profile: CostProfile, hardware: Hardware, setting: ExecutionSettings
) -> CostProfile:
    """Return a composed profile with its sources of error added.

    If the engine was not measured, return the profile unchanged.
    """
    kind = classify_configuration(hardware, setting)
    packaged = packaged_sources()
    kernels = bool(profile.fit.unmeasured_kernels)
    sources = packaged.find(kind, setting.release, kernels=kernels)
    if not sources:
        bare = profile.fit.model_copy(update={"sources": []})
        return profile.model_copy(update={"fit": bare}) if profile.fit.sources else profile
    if kind not in packaged.measured.pairs or packaged.measured.beyond(kind, setting.release):
        sources = _add_kernel_spread(sources, profile.fit.sources)
    if profile.fit.held_out:
        sources.append(ErrorSource(name="data sheet", ends=error_ends(profile.fit.held_out)))
    elif link := _link_estimate(hardware):
        sources.append(ErrorSource(name="link", ends=error_ends(link)))
    count = sum(other.backend == kind.backend for other in packaged.measured.pairs)
    errors = {}
    for step, i in STEP_KINDS.items():
        low, high = combine_ends([source.ends[step] for source in sources])
        errors[step] = StepError(
            points=count,
            median=packaged.typical[i] * (high - low) / 2,
            p95=max(math.exp(-low) - 1.0, 1.0 - math.exp(-high)),
            bias=math.exp(-(low + high) / 2) - 1.0,
        )
    known = profile.fit.note.removesuffix(f"; {UNKNOWN_ERROR}")
    note = "; ".join(filter(None, [known, _describe(sources)]))
    fit = profile.fit.model_copy(update={"held_out": errors, "sources": sources, "note": note})
    return profile.model_copy(update={"fit": fit})


def find_kernel_source(profile: CostProfile, spread: tuple[float, float]) -> list[ErrorSource]:
    """Return the source of error ``kernels``: it is unknown on which kernel the experts run.

    ``spread`` contains the lowest and the highest log(time / used time) of the experts. The result
    contains these ends for whole steps: for a prefill of ``SPREAD_PROMPT`` tokens, and for
    ``SPREAD_SEQS`` decodes. The result is empty if the kernel is known.
    """
    if max(map(abs, spread)) < MIN_SPREAD:
        return []
    prompt, seqs = SPREAD_PROMPT, SPREAD_SEQS
    loads = {
        "prefill": StepLoad(1, prompt, 0, 0, 0, count_attention_pairs(prompt, 0), 1),
        "decode": StepLoad(0, 0, 0, seqs, seqs * prompt, 0, seqs, prompt, prompt),
    }
    ends = {}
    for step, load in loads.items():
        used, *others = (StepCost(_scale_experts(profile, end))(load) for end in (0.0, *spread))
        low, high = (round(math.log(other / used), 4) for other in others)
        ends[step] = low, high
    return [ErrorSource(name="kernels", ends={**ends, "mixed": ends["prefill"]})]


def _scale_experts(profile: CostProfile, log_factor: float) -> CostProfile:
    factor = math.exp(log_factor)
    terms = [
        term.model_copy(update={"table": [(x, factor * y) for x, y in term.table]})
        if term.name == "experts" and term.table
        else term
        for term in profile.terms
    ]
    return profile.model_copy(update={"terms": terms})


def _add_kernel_spread(
    sources: Sequence[ErrorSource], spread: Sequence[ErrorSource]
) -> list[ErrorSource]:
    """Return the sources with the source ``kernels`` at least as wide as the spread."""
    if not spread:
        return list(sources)
    ends = dict(spread[0].ends)
    for source in sources:
        if source.name == spread[0].name:
            for step, (low, high) in source.ends.items():
                ends[step] = min(low, ends[step][0]), max(high, ends[step][1])
    others = [source for source in sources if source.name != spread[0].name]
    return [*others, ErrorSource(name=spread[0].name, ends=ends)]


def _describe(sources: Sequence[ErrorSource]) -> str:
    """Return the interval of each source of error as text, such as ``model -20 to +34 %
    (prefill)``.
    """
    parts = []
    for source in sources:
        prefill, decode = (_percent(source.ends[step]) for step in ("prefill", "decode"))
        parts.append(f"{source.name} {prefill} (prefill), {decode} (decode)")
    return f"sources of error: {'; '.join(parts)}"


def _percent(ends: tuple[float, float]) -> str:
    low, high = (round(100 * math.expm1(end)) for end in ends)
    return " to ".join(f"{end:+}" if end else "0" for end in (low, high)) + " %"


def describe_error(
    hardware: Hardware, setting: ExecutionSettings, *, data_sheet: bool = False
) -> str:
    """Return a short text about the error of step times on the hardware, or "" if unknown.

    ``data_sheet`` is true if there are no operator tables for the GPU.
    """
    bare = CostProfile.model_construct(
        fit=FitQuality(points=0, held_out=estimate_errors() if data_sheet else {})
    )
    fit = add_error_sources(bare, hardware, setting).fit
    if not fit.sources:
        return ""
    prefill, decode = (100 * fit.held_out[step].p95 for step in ("prefill", "decode"))
    names = [UNMEASURED[source.name] for source in fit.sources if source.name in UNMEASURED]
    whose = f"not measured: {', '.join(names)}" if names else "measured pair"
    return f"prefill {prefill:.0f} %, decode {decode:.0f} % ({whose})"


def _link_estimate(hardware: Hardware) -> Mapping[str, StepError]:
    """Return the error of steps with collectives that were estimated from the data sheet, or
    nothing.
    """
    measured = hardware.gpus == 1 or hardware.interconnect == hardware.gpu.interconnect()
    return {} if measured else estimate_errors()
