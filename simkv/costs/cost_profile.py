"""Cost profiles: step costs of a named engine on a named GPU, as typed JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from simkv.core.errors import InputError, spelling_hint
from simkv.core.input_files import read_text
from simkv.costs.attention_grid import AttentionGrid, GridCost
from simkv.costs.attention_table import AttentionCost, AttentionTable
from simkv.costs.cost_terms import (
    FeatureFunction,
    TermFunction,
    make_interpolated,
    make_linear,
    make_piecewise_linear,
    memoize,
    sum_terms,
)
from simkv.costs.frozen_model import FrozenModel, check_numbers
from simkv.costs.step_load import StepLoad

Feature = Literal[
    "steps",
    "prefill_seqs",
    "prefill_tokens",
    "prefill_context",
    "prefill_pairs",
    "prefill_mean",
    "decode_seqs",
    "decode_context",
    "tokens",
    "slots",
    "group_tokens",
    "emits",
    "decode_mean",
    "decode_tail",
    "mixed_decode_seqs",
]
#: Features removed in 0.3, because no simulated engine swaps KV during a step.
_SWAPS = ("swap_out_blocks", "swap_in_blocks")
StepFilter = Literal["prefill", "decode", "mixed", "pure decode", "any"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _without_swaps(data: Any) -> Any:
    """Remove the costs of swapping, which only profiles of simkv 0.2 contain."""
    if not isinstance(data, dict) or not isinstance(data.get("terms"), list):
        return data
    terms = [
        term
        for term in data["terms"]
        if not (isinstance(term, dict) and term.get("feature") in _SWAPS)
    ]
    ranges = data.get("range")
    if isinstance(ranges, dict):
        ranges = {name: ends for name, ends in ranges.items() if name not in _SWAPS}
    return {**data, "terms": terms, "range": ranges}


class LinearPiece(FrozenModel):
    """Linear cost ``base + slope * feature`` (s) for feature values up to ``up_to`` (inclusive)."""

    up_to: int | None = None
    base: float
    slope: float = 0.0


class CostTerm(FrozenModel):
    """A term of a step's cost in seconds, as a function of one ``feature`` of the step.

    ``slots`` is the number of tokens after padding to the size of a CUDA graph. ``group_tokens`` is
    the number of tokens of all data-parallel ranks in lockstep. ``emits`` is the number of sampled
    tokens. ``prefill_mean`` is the mean number of tokens that a prefill token attends to.
    ``decode_mean`` is the mean context of the decodes. ``decode_tail`` is the longest decode
    context minus the mean. ``mixed_decode_seqs`` is the number of decodes in a step with prefills.
    ``steps`` is always 1.

    The function is ``seconds`` per unit, linear ``pieces``, or a ``table`` of measured ``[value,
    seconds]`` pairs. ``when`` restricts the term to steps with prefills, with decodes, with both
    (``mixed``) or with decodes only (``pure decode``).
    """

    name: str
    feature: Feature
    when: StepFilter = "any"
    seconds: Seconds | None = None
    pieces: list[LinearPiece] | None = Field(default=None, min_length=1)
    table: list[tuple[float, float]] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_form(self) -> CostTerm:
        given = [f for f in ("seconds", "pieces", "table") if getattr(self, f) is not None]
        if len(given) != 1:
            raise ValueError(f"must have exactly one of seconds, pieces, table; found {given}")
        if self.pieces:
            limits = [p.up_to for p in self.pieces]
            finite = [limit for limit in limits[:-1] if limit is not None]
            if limits[-1] is not None or len(finite) < len(limits) - 1 or finite != sorted(finite):
                raise ValueError("pieces: up_to must increase and be null in the last piece")
        if self.table and [x for x, _ in self.table] != sorted({x for x, _ in self.table}):
            raise ValueError("table: values must be strictly increasing")
        return self


class StepError(FrozenModel):
    """Relative errors of predicted step times over ``points`` held-out steps; 0.01 is 1 %.

    ``median`` and ``p95`` are statistics of the absolute error. ``bias`` is the mean signed error.
    """

    points: int
    median: float
    p95: float
    bias: float

    @property
    def lasting(self) -> float:
        """Relative error of the mean duration of many steps: the bias and its statistical
        uncertainty.
        """
        if not self.points:
            return self.p95
        return min(self.p95, abs(self.bias) + self.p95 / sqrt(self.points))


class ErrorSource(FrozenModel):
    """A reason for errors of step times, such as kernels that were not measured.

    ``ends`` contains a 90 % interval of log(real / predicted) for each kind of step.
    """

    name: str
    ends: dict[str, tuple[float, float]]


class FitQuality(FrozenModel):
    """Quality of the fit of the cost terms to measurements.

    ``rms_s`` is the root mean square error in seconds over ``points`` measurements. ``held_out``
    contains the errors on held-out steps by kind of step. ``beyond`` contains the relative step
    error for each doubling of a feature outside the range. ``unmeasured_kernels`` are kernels of
    the engine without measurements. Composed costs have ``sources`` (sources of error) in place of
    ``held_out``.
    """

    points: int
    rms_s: float | None = None
    note: str = ""
    held_out: dict[str, StepError] = Field(default={})
    beyond: dict[Feature, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default={})
    unmeasured_kernels: list[str] = Field(default=[])
    sources: list[ErrorSource] = Field(default=[])


class CostProfile(FrozenModel):
    """Step costs of an engine, model and GPU, with their range and the sources of the data.

    The step time is the sum of the ``terms``, plus the attention time from ``attention`` or
    ``grid``. It is at least the host time of a launch, which is the sum of the terms in ``floor``.

    ``graph_sizes`` are the token counts of captured CUDA graphs. ``range`` contains the smallest
    and largest measured value of each feature. ``idle_pass_s`` is the duration of a scheduler pass
    with nothing to run. ``front_s`` is the time before the engine core receives a request; only
    ``simkv validate`` adds this time.
    """

    format: Literal[1] = 1
    name: str
    engine: str
    model: str
    gpu: str
    basis: Literal[
        "measured",
        "composed of measured operators",
        "estimated from the data sheet",
        "fitted to published figures",
        "assumed",
    ]
    terms: list[CostTerm] = Field(min_length=1)
    attention: AttentionTable | None = None
    grid: AttentionGrid | None = None
    floor: list[CostTerm] | None = None
    graph_sizes: list[int] = Field(default=[])
    idle_pass_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    front_s: Seconds = 0.0
    range: dict[Feature, tuple[float, float]]
    fit: FitQuality
    source: list[str]

    @model_validator(mode="before")
    @classmethod
    def _within_reason(cls, data: Any) -> Any:
        check_numbers(data)
        return _without_swaps(data)

    @model_validator(mode="after")
    def _costs_time(self) -> CostProfile:
        if self.graph_sizes != sorted(set(self.graph_sizes)):
            raise ValueError("graph_sizes must be strictly increasing")
        if self.attention and self.grid:
            raise ValueError("attention: cannot be combined with grid")
        by_context = {"decode_context", "decode_mean", "decode_tail"}
        if any(term.feature in by_context for term in self.floor or ()):
            raise ValueError(
                "floor: must not contain terms that depend on the context, because host time does "
                "not depend on it"
            )
        for load in (StepLoad(1, 1, 0, 0, 0, 1, 1), StepLoad(0, 0, 0, 1, 1, 0, 1)):
            if StepCost(self)(load) < 1e-9:
                kind = "prefill" if load.prefill_seqs else "decode"
                raise ValueError(f"terms: a {kind} step of one sequence must take at least 1e-9 s")
        return self


class StepCost:
    """Step time in seconds, computed from a ``CostProfile``."""

    def __init__(self, profile: CostProfile) -> None:
        if profile.grid:
            self._terms = _summands(merge_tables(profile.terms), lambda term: memoize(_form(term)))
        else:
            self._terms = _summands(profile.terms)
        self._head = _summands([term for term in profile.terms if term.feature == "emits"])
        self._floor = _summands(profile.floor or ())
        self._floors: dict[int, float] = {}
        self._attention: AttentionCost | GridCost | None = None
        if profile.attention:
            self._attention = AttentionCost(profile.attention)
        elif profile.grid:
            self._attention = GridCost(profile.grid)
        self._graph_sizes = profile.graph_sizes
        lengths = ("decode_context", "decode_mean", "decode_tail")
        by_context = [t for t in profile.terms if t.feature in lengths]
        self._by_tail = any(t.feature == "decode_tail" for t in profile.terms)
        self._by_batch_only = not by_context and all(
            t.feature != "group_tokens" for t in profile.terms
        )
        self._linear = not (self._attention or self._floor) and all(
            t.seconds is not None and t.feature == "decode_context" for t in by_context
        )
        self._slope = sum(
            t.seconds or 0.0 for t in by_context if t.when not in ("prefill", "mixed")
        )
        self._by_batch: dict[int, float] = {}

    def __call__(self, load: StepLoad) -> float:
        seconds = self._device(load)
        return max(seconds, self._host(load)) if self._floor else seconds

    def head(self, load: StepLoad) -> float:
        """Return the time (s) of the output head and the sampler.

        Returns 0 if the profile has no separate time for them.
        """
        return sum_terms(self._head, load, self._graph_sizes)

    def ahead(self, load: StepLoad, steps: int) -> list[float] | None:
        """Return the durations in seconds of the next ``steps`` decode steps.

        Return None if the profile requires a separate evaluation of each step.
        """
        if not (self._by_batch_only and isinstance(self._attention, GridCost)):
            return None
        base, _ = self.linear_decode_cost(load.decode_seqs)
        least = self._host(load._replace(prefill_seqs=0)) if self._floor else 0.0
        return [max(base + more, least) for more in self._attention.ahead(load, steps)]

    def _host(self, load: StepLoad) -> float:
        if load.prefill_seqs:
            return sum_terms(self._floor, load, self._graph_sizes)
        found = self._floors.get(load.decode_seqs)
        if found is None:
            found = sum_terms(self._floor, load, self._graph_sizes)
            self._floors[load.decode_seqs] = found
        return found

    def _device(self, load: StepLoad) -> float:
        plain = not load.prefill_seqs
        if self._linear and plain:
            base, slope = self.linear_decode_cost(load.decode_seqs)
            return base + slope * load.decode_context
        if self._attention is None:
            return self._sum(load)
        if self._by_batch_only and plain:
            return self.linear_decode_cost(load.decode_seqs)[0] + self._attention(load)
        return self._sum(load) + self._attention(load)

    def linear_decode_cost(self, seqs: int) -> tuple[float, float]:
        """Return the base cost (s) of a step with ``seqs`` decodes, and the cost (s) per context
        token.

        The base cost does not include attention times from a table or grid. ``linear`` must be
        true.
        """
        base = self._by_batch.get(seqs)
        if base is None:
            base = self._by_batch[seqs] = self._sum(StepLoad(0, 0, 0, seqs, 0, 0, seqs))
        return base, self._slope

    @property
    def needs_decode_range(self) -> bool:
        """Whether the cost depends on the shortest and the longest decode context of a step."""
        by_table = isinstance(self._attention, AttentionCost) and self._attention.needs_decode_range
        return self._by_tail or by_table

    @property
    def linear(self) -> bool:
        """Whether the cost of a decode step is linear in the total context of the decodes."""
        return self._linear

    def _sum(self, load: StepLoad) -> float:
        return sum_terms(self._terms, load, self._graph_sizes)


def merge_tables(terms: Sequence[CostTerm]) -> list[CostTerm]:
    """Merge terms that have tables and the same ``feature`` and ``when``. Other terms are
    unchanged.
    """
    groups: dict[object, list[CostTerm]] = {}
    for number, term in enumerate(terms):
        alike = (term.feature, term.when) if term.table else number
        groups.setdefault(alike, []).append(term)
    return [group[0] if len(group) == 1 else _sum_of(group) for group in groups.values()]


def _sum_of(terms: Sequence[CostTerm]) -> CostTerm:
    forms = [_form(term) for term in terms]
    xs = sorted({x for term in terms for x, _ in term.table or ()})
    table = [(x, sum(form(x) for form in forms)) for x in xs]
    name = ", ".join(term.name for term in terms)
    return terms[0].model_copy(update={"name": name, "table": table})


def _form(term: CostTerm) -> FeatureFunction:
    if term.seconds is not None:
        return make_linear(term.seconds)
    if term.pieces is not None:
        limits = (inf if p.up_to is None else p.up_to for p in term.pieces)
        lines = zip(limits, term.pieces, strict=True)
        return make_piecewise_linear([(limit, p.base, p.slope) for limit, p in lines])
    assert term.table is not None
    xs, ys = zip(*term.table, strict=True)
    return make_interpolated(xs, ys)


def _summands(
    terms: Sequence[CostTerm], form: Callable[[CostTerm], FeatureFunction] = _form
) -> list[TermFunction]:
    return [TermFunction(term.feature, term.when, form(term)) for term in terms]


PACKAGED = Path(__file__).parent / "profiles"


def packaged_profiles() -> list[str]:
    """Return the names of the profiles packaged with simkv."""
    return sorted(path.stem for path in PACKAGED.glob("*.json"))


def profile_path(name: str, beside: Path | None = None) -> Path:
    """Return the path of a packaged profile, or of a JSON file relative to ``beside``.

    ``beside`` defaults to the current directory. Raises InputError if there is no such profile.
    """
    if name.endswith(".json"):
        path = (beside or Path()) / name
        if not path.exists() or path.is_dir():
            raise InputError(f"profile: file {path} does not exist")
        return path
    known = packaged_profiles()
    if name not in known:
        raise InputError(
            f"profile: unknown profile {name!r}{spelling_hint(name, known)}; expected one of "
            f"{', '.join(known)}, or the path of a .json file"
        )
    return PACKAGED / f"{name}.json"


def load_profile(name: str, beside: Path | None = None) -> CostProfile:
    """Load a packaged profile, or a JSON file relative to ``beside``.

    Raises InputError if the profile is missing or invalid.
    """
    path = profile_path(name, beside)
    try:
        return CostProfile.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise InputError(f"{path}: {where}: {first['msg']}") from error
