"""Role of each scenario field, declared at the field.

class Scenario(BaseModel):
    summary: AboutField[str] = ""
    timeout: WorldField[float | None] = None

find_field_names(Scenario, FieldRole.ABOUT) # ("summary",)

The roles determine digests, the content of saved files, differences between scenarios, and the
fields that ``--over`` accepts.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Annotated, TypeVar

from pydantic import BaseModel


class FieldRole(StrEnum):
    """Role of a scenario field.

    ``ABOUT`` fields describe the scenario and do not change its runs. ``WORLD`` fields describe the
    engine's environment: workload, costs and timeouts. ``ENGINE`` fields are settings of the
    server, which a suggested fix may change.
    """

    ABOUT = "about"
    WORLD = "world"
    ENGINE = "engine"


T = TypeVar("T")
AboutField = Annotated[T, FieldRole.ABOUT]
WorldField = Annotated[T, FieldRole.WORLD]
EngineField = Annotated[T, FieldRole.ENGINE]


@cache
def roles(model: type[BaseModel]) -> dict[str, FieldRole]:
    """Return the role of every field of a model.

    Raises TypeError if a field has no role or several roles.
    """
    found = {}
    for name, field in model.model_fields.items():
        given = [role for role in field.metadata if isinstance(role, FieldRole)]
        if len(given) != 1:
            raise TypeError(
                f"{model.__name__}.{name}: must have exactly one role, found {len(given)}"
            )
        found[name] = given[0]
    return found


def find_field_names(model: type[BaseModel], *wanted: FieldRole) -> tuple[str, ...]:
    """Return the names of a model's fields with one of the given roles."""
    return tuple(name for name, role in roles(model).items() if role in wanted)
