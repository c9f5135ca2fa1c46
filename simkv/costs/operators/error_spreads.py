"""Errors of composed costs by kind of configuration, from published serving measurements.

``spreads.json`` is written by ``make calibrate-silicon`` and contains no measurements itself. A
spread consists of quantiles of the ratio of measured to predicted latency, over configurations that
were excluded from the calibration. ``groups`` contains the spreads for the same model on the same
GPU. ``unseen`` contains the spreads for other pairs of model and GPU, by level of similarity; for
these spreads, each pair was excluded from the calibration completely.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.core.engine_version import count_releases
from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.cost_profile import CostProfile, StepError
from simkv.costs.hardware.model_architecture import GatedDeltaNet, Mamba, Mla
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.roofline import estimate_errors
from simkv.schedulers.engine_registry import ENGINES

SPREADS_PATH = Path(__file__).with_name("spreads.json")
#: For each GPU family, words that occur in the names of its GPUs.
GPU_FAMILIES = {
    "blackwell": ("B200", "B300", "GB200", "GB300"),
    "blackwell workstation": ("PRO", "5090"),
    "hopper": ("H100", "H200", "H20", "GH200"),
    "ada": ("L4", "L40S", "L40", "4090"),
    "ampere": ("A100", "A10", "3090"),
}


MLP_LABELS = {"dense": "dense models", "moe": "mixtures of experts"}
#: Descriptions of the levels of similarity, in the order of ``Configuration.levels``.
LEVEL_LABELS = (
    "this model on this GPU in these formats",
    "other models with this kind of attention and these formats on this GPU",
    "other models with this kind of attention and these formats on {own.family} GPUs",
    "{mlp} on {own.family} GPUs",
    "{mlp} on other GPUs",
    "other kinds of models on other GPUs",
)
#: Amount by which each end of an interval is extended per release between the given and the
#: measured releases, and the maximum number of releases that count. Both values are assumptions.
WIDENING_PER_RELEASE, MAX_WIDENED_RELEASES = 0.02, 10


@dataclass(frozen=True)
class Configuration:
    """Properties of a configuration that determine which error spread applies to it.

    ``attention`` is gqa, mla, dsa (MLA with an indexer), gdn or ssm. ``experts`` is the number
    format of the experts ("none" for a dense model); ``weights`` is the number format of other
    weights.
    """

    backend: str
    family: str
    gpu: str
    model: str
    attention: str
    experts: str
    weights: str

    @property
    def mlp(self) -> str:
        """``dense``, or ``moe`` for a mixture of experts."""
        return "dense" if self.experts == "none" else "moe"

    def describe_level(self, level: str) -> str:
        """Describe the configurations at a level of similarity, for the user."""
        return LEVEL_LABELS[self.levels().index(level)].format(mlp=MLP_LABELS[self.mlp], own=self)

    def levels(self) -> tuple[str, ...]:
        """Return the names of the levels of similarity, from the same model and GPU to any model
        and GPU.
        """
        return (
            f"{self.backend}, {self.model} on {self.gpu}, {self.weights} {self.experts}",
            f"{self.backend}, {self.gpu}, {self.attention} {self.experts} {self.weights}",
            f"{self.backend}, {self.family}, {self.attention} {self.experts} {self.weights}",
            f"{self.backend}, {self.family}, {self.mlp}",
            f"{self.backend}, {self.mlp}",
            self.backend,
        )


def classify_configuration(hardware: Hardware, setting: ExecutionSettings) -> Configuration:
    """Return the ``Configuration`` of a replica."""
    model, gpu = hardware.architecture, hardware.gpu.name
    kinds = [part.attention for part in model.layers]
    attention = "gqa"
    if any(isinstance(kind, Mamba) for kind in kinds):
        attention = "ssm"
    elif any(isinstance(kind, GatedDeltaNet) for kind in kinds):
        attention = "gdn"
    elif any(isinstance(kind, Mla) and kind.sparse for kind in kinds):
        attention = "dsa"
    elif any(isinstance(kind, Mla) for kind in kinds):
        attention = "mla"
    experts = hardware.experts if model.experts else "none"
    return Configuration(
        setting.engine, find_gpu_family(gpu), gpu, model.name, attention, experts, hardware.weights
    )


def find_gpu_family(gpu: str) -> str:
    """Return the family of a GPU, such as ``hopper``, or ``unknown``."""
    words = set(gpu.split())
    return next((name for name, own in GPU_FAMILIES.items() if words & set(own)), "unknown")


@dataclass(frozen=True)
class ErrorSpread:
    """Intervals of log(measured / predicted) that contain 90 % of the measurements, for TTFT and
    TPOT.

    ``points`` is the number of measurements, which were excluded from the calibration. ``median``
    contains the medians of the absolute relative errors of TTFT and TPOT, and ``bias`` the means of
    the signed errors. ``releases`` are the first and the last measured release of the engine.
    """

    ttft: tuple[float, float]
    tpot: tuple[float, float]
    points: int
    median: tuple[float, float] = (0.0, 0.0)
    bias: tuple[float, float] = (0.0, 0.0)
    releases: tuple[str, str] = ("", "")

    def beyond(self, engine: str, release: str) -> int:
        """Return the number of releases between ``release`` and the measured releases; 0 if
        ``release`` is unknown.
        """
        part = ENGINES[engine].release_part if engine in ENGINES else 1
        first, last = self.releases
        return max(count_releases(release, first, part), count_releases(last, release, part), 0)

    def wider(self, by: float) -> ErrorSpread:
        """Return the spread with both intervals extended by ``by`` at each end."""
        ttft, tpot = ((low - by, high + by) for low, high in (self.ttft, self.tpot))
        return replace(self, ttft=ttft, tpot=tpot)


@dataclass(frozen=True)
class ErrorSpreads:
    """Error spreads by level of similarity, with the source of the measurements."""

    groups: Mapping[str, ErrorSpread]
    unseen: Mapping[str, ErrorSpread]
    provenance: Mapping[str, Any]

    def of(self, kind: Configuration) -> tuple[ErrorSpread, str] | None:
        """Return the spread of the most similar configurations and the name of their level.

        Return None if no similar configuration was measured.
        """
        own, *wider = kind.levels()
        if own in self.groups:
            return self.groups[own], own
        for level in wider:
            if level in self.unseen:
                return self.unseen[level], level
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``spreads.json``."""
        return {
            "provenance": dict(self.provenance),
            "groups": {name: asdict(spread) for name, spread in self.groups.items()},
            "unseen": {name: asdict(spread) for name, spread in self.unseen.items()},
        }


def read_spreads(path: Path = SPREADS_PATH) -> ErrorSpreads:
    """Read spreads from a file. If it does not exist, the result contains no spreads."""
    if not path.is_file():
        return ErrorSpreads({}, {}, {})
    data = json.loads(path.read_text(encoding="utf-8"))

    def read(name: str) -> dict[str, ErrorSpread]:
        found = {}
        for level, spread in data[name].items():
            values: dict[str, Any] = {k: tuple(v) for k, v in spread.items() if k != "points"}
            found[level] = ErrorSpread(points=spread["points"], **values)
        return found

    return ErrorSpreads(read("groups"), read("unseen"), data["provenance"])


@lru_cache(maxsize=1)
def packaged_spreads() -> ErrorSpreads:
    """Return the spreads packaged with simkv."""
    return read_spreads()


def add_spread_error(
    profile: CostProfile, hardware: Hardware, setting: ExecutionSettings
) -> CostProfile:
    """Return a composed profile with the error spread of its configuration as step error.

    The profile is unchanged if no similar configuration was measured. The TTFT spread applies to
    steps with prefills, the TPOT spread to decode steps. If the profile is a data-sheet estimate,
    the error of such estimates is added, because spreads refer to profiles composed from tables.
    The same error is added if several GPUs use an interconnect without measurements, because the
    times of collectives are then estimated.
    """
    kind = classify_configuration(hardware, setting)
    found = packaged_spreads().of(kind)
    if found is None:
        return profile
    spread, level = found
    beyond = spread.beyond(setting.engine, setting.release)
    wider = WIDENING_PER_RELEASE * min(beyond, MAX_WIDENED_RELEASES)
    note = _note(spread, kind, level)
    if beyond:
        measured = " to ".join(dict.fromkeys(spread.releases))
        note += (
            f"; widened by {100 * wider:.0f} % because {setting.engine} {setting.release} is "
            f"{beyond} releases away from the measured ones ({measured})"
        )
    estimate = profile.fit.held_out or _link_estimate(hardware)
    if estimate and not profile.fit.held_out:
        note += (
            f"; link unknown: no measurement of {hardware.gpus} {hardware.gpu.name} over this "
            f"{hardware.interconnect.kind} link, so the error of a data-sheet estimate is added"
        )
    errors = _with_estimate(_errors(spread.wider(wider)), estimate)
    if profile.fit.held_out:
        note = f"{profile.fit.note}; combined with the error of whole steps: {note}"
    fit = profile.fit.model_copy(update={"held_out": errors, "note": note})
    return profile.model_copy(update={"fit": fit})


def describe_spread(
    hardware: Hardware, setting: ExecutionSettings, estimate: Mapping[str, StepError] | None = None
) -> str:
    """Describe the step error on this hardware in a few words; empty if it is unknown.

    ``estimate`` is the error of a data-sheet estimate against operator tables, for hardware without
    tables.
    """
    kind = classify_configuration(hardware, setting)
    found = packaged_spreads().of(kind)
    if found is None:
        return ""
    spread, level = found
    beyond = spread.beyond(setting.engine, setting.release)
    spread = spread.wider(WIDENING_PER_RELEASE * min(beyond, MAX_WIDENED_RELEASES))
    errors = _with_estimate(_errors(spread), estimate or _link_estimate(hardware))
    prefill, decode = (100 * errors[step].p95 for step in ("prefill", "decode"))
    whose = "calibrated pair" if level == kind.levels()[0] else kind.describe_level(level)
    return f"prefill {prefill:.0f} %, decode {decode:.0f} % ({whose})"


def _link_estimate(hardware: Hardware) -> Mapping[str, StepError]:
    """Return the error of estimated collectives; empty if they are measured or absent.

    The result is the error of a whole step that is estimated from the data sheet.
    """
    measured = hardware.gpus == 1 or hardware.interconnect == hardware.gpu.interconnect()
    return {} if measured else estimate_errors()


def _note(spread: ErrorSpread, kind: Configuration, level: str) -> str:
    if level == kind.levels()[0]:
        return (
            f"calibrated for this model on this GPU: errors from {spread.points} published "
            "measurements of this pair, each predicted without using it"
        )
    return (
        f"no measurement of this model on this GPU in these formats: errors from the nearest "
        f"{spread.points} published measurements ({kind.describe_level(level)}), each "
        "predicted without using any measurement of its model on its GPU"
    )


def _errors(spread: ErrorSpread) -> dict[str, StepError]:
    prefill, decode = _step_error(spread, 0), _step_error(spread, 1)
    return {"prefill": prefill, "mixed": prefill, "decode": decode}


def _with_estimate(
    errors: Mapping[str, StepError], estimate: Mapping[str, StepError]
) -> dict[str, StepError]:
    """Combine two independent errors for each kind of step."""
    return {
        step: error.model_copy(
            update={
                "median": math.hypot(error.median, estimate[step].median),
                "p95": math.hypot(error.p95, estimate[step].p95),
                "bias": error.bias + estimate[step].bias,
            }
        )
        if step in estimate
        else error
        for step, error in errors.items()
    }


def _step_error(spread: ErrorSpread, latency: int) -> StepError:
    low, high = (spread.ttft, spread.tpot)[latency]
    worst = max(math.exp(-low) - 1.0, 1.0 - math.exp(-high))
    return StepError(
        points=spread.points,
        median=spread.median[latency],
        p95=worst,
        bias=spread.bias[latency],
    )
