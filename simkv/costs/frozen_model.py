"""What costs and facts are made of: checked, unchangeable data without unknown fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Data as read from JSON: no field that is not known, no number that is not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


#: Largest number in a profile: sums of products of larger ones are infinite.
LARGEST = 1e15


def check_numbers(data: Any, where: str = "") -> None:
    """Raise ValueError, by field, for a number beyond ``LARGEST`` in data as read from JSON."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            check_numbers(value, f"{where}.{key}" if where else str(key))
    elif isinstance(data, int | float) and not abs(data) <= LARGEST:
        raise ValueError(f"{where}: should be finite and at most {LARGEST:g} in size")
