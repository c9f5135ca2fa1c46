"""Base of models for costs and hardware data: validated, immutable, without unknown fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Immutable data read from JSON; unknown fields and non-finite numbers are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


#: Largest number in a profile; sums of products of larger numbers overflow.
LARGEST = 1e15


def check_numbers(data: Any, where: str = "") -> None:
    """Raise ValueError, with the field, for a number beyond ``LARGEST`` in JSON data."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            check_numbers(value, f"{where}.{key}" if where else str(key))
    elif isinstance(data, int | float) and not abs(data) <= LARGEST:
        raise ValueError(f"{where}: must be finite, with an absolute value of at most {LARGEST:g}")
