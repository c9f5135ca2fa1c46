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
    """Role of a field: ``ABOUT`` fields describe a scenario; all other fields determine its runs.

    ``WORLD`` fields are the environment of the engine: workload, costs and timeouts. ``ENGINE``
    fields are chosen by the operator of the server, so a suggested fix may change them.
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
    """Return the fields of a model that have one of the given roles, in the order of the model."""
    return tuple(name for name, role in roles(model).items() if role in wanted)
