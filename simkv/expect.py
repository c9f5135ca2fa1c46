"""What a scenario expects of its variants: bounds on their figures, and whether they held.

expect:
  before: {verdict: livelock, finished: {le: 3}}
  after:
    makespan_s: {within: [3.0, 3.2]}
    request: {0: {preemptions: 0, ttft_s: {le: 1.5}}}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from simkv.metrics import FIGURES, figure

if TYPE_CHECKING:
    from simkv.simulate import Result

Verdict = Literal[
    "served",
    "livelock",
    "deadlock",
    "engine died",
    "lost",
    "starved",
    "rejected",
    "cut_off",
]
Ending = Literal["finished", "starved", "rejected", "lost", "stalled", "cut_off"]

#: Columns of ``requests.csv`` that one request may be held to; times in seconds.
REQUEST_FIGURES = (
    "first_token_s",
    "finish_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "preemptions",
    "recomputed_tokens",
)

Number = Annotated[float, Field(allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Bound(_Model):
    """What a figure must be: exactly one of ``eq``, ``le``, ``ge`` and ``within``.

    ``within`` is ``[low, high]``, both included. Numbers that differ by less than 1e-9, relative,
    are equal.
    """

    eq: Number | None = None
    le: Number | None = None
    ge: Number | None = None
    within: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Bound:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"exactly one of eq, le, ge, within is needed; found {found}")
        if self.within and self.within[0] > self.within[1]:
            raise ValueError(f"within needs [low, high]; found {self.within}")
        return self

    def missed_by(self, found: float) -> float:
        """How far ``found`` is off, with its sign; 0 if the bound holds."""
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


#: A bare number stands for ``{eq: number}``, and for words the other way round.
Expected = Annotated[Bound, BeforeValidator(_bare_number, json_schema_input_type=float | Bound)]


def _with_bounds(base: type[_Model], names: tuple[str, ...]) -> Any:
    """``base`` with an optional bound for each of ``names``, so that a wrong name is an error."""
    fields: dict[str, Any] = dict.fromkeys(names, (Expected | None, None))
    return create_model(base.__name__.lstrip("_"), __base__=base, __doc__=base.__doc__, **fields)


class _OfRequest(_Model):
    """What must come of one request: its ``outcome``, and bounds on its row of requests.csv."""

    outcome: Annotated[Ending, BeforeValidator(_bare_word)] | None = None


if TYPE_CHECKING:
    OfRequest = _OfRequest
else:
    OfRequest = _with_bounds(_OfRequest, REQUEST_FIGURES)


class _Expectations(_Model):
    """What must come of one variant: its ``verdict``, and bounds on its figures in summary.json.

    ``request`` holds single requests to account, by id.
    """

    verdict: Annotated[Verdict, BeforeValidator(_bare_word)] | None = None
    request: dict[Annotated[int, Field(ge=0, strict=False)], OfRequest] = {}


if TYPE_CHECKING:
    Expectations = _Expectations
else:
    Expectations = _with_bounds(_Expectations, FIGURES)


@dataclass(frozen=True)
class Check:
    """One expectation of one variant and what was found.

    ``missed_by`` is the distance to the bound, None where there is none to tell: between words,
    or if the request never got so far (``found`` is then None).
    """

    variant: str
    figure: str
    expected: str
    found: float | str | None
    ok: bool
    missed_by: float | None = None

    def __str__(self) -> str:
        missed = f", missed by {self.missed_by:+.6g}" if self.missed_by else ""
        return f"{self.figure} {self.expected}: found {show(self.found)}{missed}"


def show(found: float | str | None) -> str:
    """A figure as text; ``none`` where a request has none."""
    if found is None:
        return "none"
    return found if isinstance(found, str) else f"{found:.10g}"


def check(results: Mapping[str, Result]) -> list[Check]:
    """Every expectation of the scenario against the results of its variants."""
    checks: list[Check] = []
    for variant, result in results.items():
        expected = result.scenario.expect.get(variant)
        if expected is None:
            continue
        for name, bound in _given(expected):
            checks.append(_check(variant, name, bound, figure(result.summary, name)))
        rows = {row["id"]: row for row in result.request_rows(variant)}
        for i, of_request in expected.request.items():
            for name, bound in _given(of_request):
                checks.append(_check(variant, f"request {i} {name}", bound, rows[i][name]))
    return checks


#: Verdicts on a run in which all that could be served was.
SERVED = ("served", "cut_off")


def exit_code(results: Iterable[Result], checks: Sequence[Check]) -> int:
    """What a run exits with: 0 served, 1 an expectation was missed, 3 somebody was not served.

    Expectations decide first: if there are some and all come true, starvation was expected.
    """
    if checks:
        return int(not all(found.ok for found in checks))
    return 0 if all(result.summary["verdict"] in SERVED for result in results) else 3


def _given(expected: _Model) -> Iterator[tuple[str, Bound | str]]:
    return ((name, value) for name, value in expected if isinstance(value, Bound | str))


def _check(variant: str, name: str, bound: Bound | str, found: float | str | None) -> Check:
    if isinstance(bound, str):
        return Check(variant, name, f"= {bound}", found, ok=found == bound)
    if found is None or isinstance(found, str):
        return Check(variant, name, str(bound), found, ok=False)
    missed = bound.missed_by(found)
    return Check(variant, name, str(bound), found, not missed, missed or None)
