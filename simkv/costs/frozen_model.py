"""Base class of cost profiles and hardware data: validated, immutable, no unknown fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Immutable data read from JSON. Unknown fields and non-finite numbers are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


#: Largest number allowed in a profile; sums of products of larger numbers would overflow.
LARGEST = 1e15


def check_numbers(data: Any, where: str = "") -> None:
    """Raise ValueError if JSON data contains a number whose absolute value exceeds ``LARGEST``.

    The message names the field; ``where`` is the dotted path of ``data`` in the file.
    """
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            check_numbers(value, f"{where}.{key}" if where else str(key))
    elif isinstance(data, int | float) and not abs(data) <= LARGEST:
        raise ValueError(f"{where}: must be finite, with an absolute value of at most {LARGEST:g}")
