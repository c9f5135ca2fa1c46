"""What each field of a scenario is for, said once, at the field.

class Scenario(BaseModel):
    summary: About[str] = ""
    timeout: World[float | None] = None

names_of(Scenario, Role.ABOUT)  # ("summary",)

Digest, saving, differences and the knobs of ``--over`` follow from it.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Annotated, TypeVar

from pydantic import BaseModel


class FieldRole(StrEnum):
    """``ABOUT`` says what a scenario is about and changes nothing in its run; the others decide it.

    ``WORLD`` is what an engine is given: load, costs, patience. ``ENGINE`` is what its operator
    chooses, and so what a remedy may change.
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
    """The role of every field of a model. Raises TypeError if one does not have exactly one."""
    found = {}
    for name, field in model.model_fields.items():
        given = [role for role in field.metadata if isinstance(role, FieldRole)]
        if len(given) != 1:
            raise TypeError(f"{model.__name__}.{name}: one role is needed; found {len(given)}")
        found[name] = given[0]
    return found


def find_field_names(model: type[BaseModel], *wanted: FieldRole) -> tuple[str, ...]:
    """The fields of a model that have one of these roles, in their order."""
    return tuple(name for name, role in roles(model).items() if role in wanted)
