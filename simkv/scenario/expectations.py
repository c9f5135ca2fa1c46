"""Expected results of a scenario's variants: bounds on their metrics.

expect:
  before: {verdict: livelock, finished: {le: 3}}
  after:
    makespan_s: {within: [3.0, 3.2]}
    request: {0: {preemptions: 0, ttft_s: {le: 1.5}}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from simkv.core.figure_registry import METRICS, SESSION_METRICS
from simkv.scenario.base_section import Section

VerdictName = Literal[
    "served",
    "livelock",
    "deadlock",
    "engine died",
    "lost",
    "starved",
    "rejected",
    "timed_out",
    "cut_off",
]


OutcomeName = Literal[
    "finished",
    "starved",
    "timed_out",
    "rejected",
    "lost",
    "stalled",
    "cancelled",
    "cut_off",
]


#: Columns of ``requests.csv`` that can have a bound for a single request; times are in seconds.
REQUEST_FIGURES = {
    "first_token_s": "the time of its first token",
    "finish_s": "its finish time",
    "ttft_s": "its time to first token",
    "tpot_s": "its time per output token after the first",
    "e2e_s": "its end-to-end latency",
    "preemptions": "its number of preemptions",
    "recomputed_tokens": "its number of recomputed tokens",
}


Number = Annotated[float, Field(allow_inf_nan=False)]


class Bound(Section):
    """Bound on a metric: exactly one of ``eq``, ``le``, ``ge`` and ``within``.

    ``within`` is ``[low, high]``, including both ends. Numbers are equal within a relative or
    absolute tolerance of 1e-9.
    """

    eq: Number | None = None
    """Exact value, with a tolerance of 1e-9. `metric: 5` is short for `metric: {eq: 5}`."""
    le: Number | None = None
    """Maximum."""
    ge: Number | None = None
    """Minimum."""
    within: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    """Range [low, high], including both ends."""

    @model_validator(mode="after")
    def _one(self) -> Bound:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"must have exactly one of eq, le, ge, within; found {found}")
        if self.within and self.within[0] > self.within[1]:
            raise ValueError(f"within: must be [low, high], got {self.within}")
        return self

    def missed_by(self, found: float) -> float:
        """Return the signed distance of ``found`` from the nearest allowed value; 0 if the bound is
        met.
        """
        low, high = self._range()
        nearest = min(max(found, low), high)
        return 0.0 if isclose(found, nearest, rel_tol=1e-9, abs_tol=1e-9) else found - nearest

    def _range(self) -> tuple[float, float]:
        if self.within is not None:
            return self.within[0], self.within[1]
        if self.eq is not None:
            return self.eq, self.eq
        low, high = self.ge, self.le
        return float("-inf") if low is None else low, float("inf") if high is None else high

    def __str__(self) -> str:
        if self.within is not None:
            return f"within {self.within[0]:g} .. {self.within[1]:g}"
        sign, value = next(
            (sign, value)
            for sign, value in (("=", self.eq), ("<=", self.le), (">=", self.ge))
            if value is not None
        )
        return f"{sign} {value:.10g}"


def _bare_number(value: Any) -> Any:
    return value if isinstance(value, dict | Bound) else {"eq": value}


def _bare_word(value: Any) -> Any:
    return value["eq"] if isinstance(value, dict) and list(value) == ["eq"] else value


#: A bound, or a number as a short form of ``{eq: number}``.
Expected = Annotated[Bound, BeforeValidator(_bare_number, json_schema_input_type=float | Bound)]


def _with_bounds(base: type[Section], figures: Mapping[str, str]) -> Any:
    """Return the model ``base`` with an optional bound for each metric.

    ``figures`` maps the names of metrics to their descriptions.
    """
    fields: dict[str, Any] = {
        name: (Annotated[Expected | None, Field(description=f"Bound on {what}.")], None)
        for name, what in figures.items()
    }
    return create_model(base.__name__.lstrip("_"), __base__=base, __doc__=base.__doc__, **fields)


class _RequestExpectations(Section):
    """Expected results of one request: its ``outcome``, and bounds on its metrics in
    requests.csv.
    """

    outcome: Annotated[OutcomeName, BeforeValidator(_bare_word)] | None = None
    """Expected outcome of the request."""


if TYPE_CHECKING:
    RequestExpectations = _RequestExpectations
else:
    RequestExpectations = _with_bounds(_RequestExpectations, REQUEST_FIGURES)


class _Expectations(Section):
    """Expected results of one variant: its ``verdict``, and bounds on its metrics in summary.json.

    ``request`` contains expected results of single requests, by id.
    """

    verdict: Annotated[VerdictName, BeforeValidator(_bare_word)] | None = None
    """Expected verdict of the run."""
    request: dict[Annotated[int, Field(ge=0, strict=False)], RequestExpectations] = Field(
        default={}
    )
    """Bounds on single requests, by id."""


if TYPE_CHECKING:
    Expectations = _Expectations
else:
    Expectations = _with_bounds(
        _Expectations,
        {
            name: f"the {metric.label}" + (f", {metric.description}" if metric.description else "")
            for name, metric in {**METRICS, **SESSION_METRICS}.items()
        },
    )


def iterate_expectations(
    expected: Expectations | RequestExpectations,
) -> Iterator[tuple[str, Bound | str]]:
    return ((name, value) for name, value in expected if isinstance(value, Bound | str))
