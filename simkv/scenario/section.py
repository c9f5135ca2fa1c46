"""A part of a scenario file."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from simkv.workload.fields import Strict

#: What a scenario or a variant may be called, and a time (s) that is not nothing.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Span = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(Strict):
    """No unknown fields, no guessing of types, never changed, and every number a number."""

    model_config = ConfigDict(allow_inf_nan=False)
