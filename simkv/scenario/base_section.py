"""A part of a scenario file."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field

from simkv.workload.workload_base import StrictModel


def _of_the_web(address: str) -> str:
    """An address that pages may link to."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc or not address.isprintable():
        raise ValueError(f"should be an address that begins with http:// or https://; {address!r}")
    return address


#: What a scenario or a variant may be called, an address, and a time (s) that is not nothing.
ScenarioName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Url = Annotated[str, AfterValidator(_of_the_web)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(StrictModel):
    """No unknown fields, no guessing of types, never changed, and every number a number."""

    model_config = ConfigDict(allow_inf_nan=False)
