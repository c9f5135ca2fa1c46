"""Fields of a plan request, shared by the command, ``simkv.plan`` and the ``plan`` section."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import ConfigDict, Field, ValidationError, field_validator

from simkv.core.errors import InputError, simplify_pydantic_message
from simkv.scenario.goodput_limits import parse_goodput_limits
from simkv.scenario.plan_section import PlanOption, PlanSection
from simkv.study.plan.candidate_search import NEIGHBOURS
from simkv.study.sweep_axes import format_assignment


class PlanRequest(PlanSection):
    """A plan request. Missing or empty fields are taken from the scenario's ``plan`` section.

    ``held_back`` contains overrides of scenario fields that define a held-out scenario.
    """

    model_config = ConfigDict(strict=False)

    overrides: Annotated[
        tuple[str, ...],
        PlanOption("--set", "PATH=VALUE"),
        Field(description="Override a field of the scenario; may be repeated."),
    ] = ()
    variants: Annotated[
        tuple[str, ...],
        PlanOption("--variant"),
        Field(description="Make a plan only for this variant; may be repeated."),
    ] = ()
    each: Annotated[
        tuple[str, ...],
        PlanOption("--over", "PATH=VALUES"),
        Field(
            description="Make one plan for each value of this field, such as "
            "hardware.gpu=H100,L40S. May be repeated; the command then makes a plan "
            "for each combination."
        ),
    ] = ()
    held_back: Annotated[
        tuple[str, ...],
        PlanOption("--held-out", "PATH=VALUE"),
        Field(
            description="Validate the answer on a held-out scenario: the same scenario with this "
            "override, such as workload.start=1200. May be repeated; all overrides apply "
            "together."
        ),
    ] = ()
    gpu_price: Annotated[
        tuple[str, ...],
        PlanOption("--gpu-price", "GPU=PRICE"),
        Field(description="Price per GPU hour, such as H100=2.5; may be repeated."),
    ] = ()
    neighbours: Annotated[
        int,
        Field(ge=0, description="Number of further candidates to try on each side of the answer."),
    ] = NEIGHBOURS
    exhaustive: Annotated[bool, Field(description="Try all candidates instead of searching.")] = (
        False
    )
    cliff: Annotated[
        bool | None,
        Field(
            description="Also simulate the answer at other request rates, to find the rate at "
            "which it fails (default: yes; no if --gpu or --tp has several values)."
        ),
    ] = None

    @field_validator(
        "objectives", "overrides", "variants", "each", "held_back", "gpu_price", mode="before"
    )
    @classmethod
    def _several(cls, given: str | Mapping[str, Any] | Iterable[str]) -> tuple[str, ...]:
        """Convert a text, several texts, or a mapping of field paths to values into a tuple."""
        if isinstance(given, Mapping):
            return tuple(format_assignment(path, value) for path, value in given.items())
        return (given,) if isinstance(given, str) else tuple(given)

    @field_validator("goodput", mode="before")
    @classmethod
    def _parsed(cls, given: Mapping[str, float] | Iterable[str]) -> Mapping[str, float]:
        return given if isinstance(given, Mapping) else parse_goodput_limits(given)

    @field_validator("prices", mode="before")
    @classmethod
    def _path(cls, given: str | Path) -> str:
        return str(given)

    def with_defaults(self, section: PlanSection, folder: Path) -> PlanRequest:
        """Return the request with missing fields taken from the ``plan`` section of a scenario
        file.
        """
        asked, said = _given(self), _given(section)
        if asked.keys() & {"smallest", "largest"}:
            said = {name: said[name] for name in said if name not in ("smallest", "largest")}
        if "prices" in said:
            said["prices"] = folder / said["prices"]
        return PlanRequest(**{**said, **asked})


def _given(section: PlanSection) -> dict[str, Any]:
    fields = {name: getattr(section, name) for name in section.model_fields_set}
    return {name: value for name, value in fields.items() if value not in ("", (), [], {})}


def parse_plan_request(given: Mapping[str, Any]) -> PlanRequest:
    """Return the request with the given fields. Fields with the value None are left out.

    Raises InputError if a field is invalid. The message names the command option of the field.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        return PlanRequest(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        found = "" if name == "goodput" else f" {first['input']}"
        raise InputError(f"{find_option(name)}{found}: {_expected(name, first['msg'])}") from error


def find_option(name: str) -> str:
    """Return the name of the command option for a field."""
    return find_option_flag(name).name or f"--{name.replace('_', '-')}"


def find_option_flag(name: str) -> PlanOption:
    """Return the metadata of the command option for a field."""
    found = (one for one in PlanRequest.model_fields[name].metadata if isinstance(one, PlanOption))
    return next(found, PlanOption())


def find_bounds(name: str) -> tuple[Any, Any]:
    """Return the lower and upper bound of a numeric field, or None without a bound."""
    rules = PlanRequest.model_fields[name].metadata
    least = next((one.ge for one in rules if isinstance(one, Ge)), None)
    return least, next((one.le for one in rules if isinstance(one, Le)), None)


def _expected(name: str, message: str) -> str:
    least, most = find_bounds(name)
    if least is None:
        return simplify_pydantic_message(message)
    return (
        f"expected a number of {least} or more" if most is None else f"expected {least} to {most}"
    )
