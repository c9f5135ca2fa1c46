"""Base class and common types of scenario sections."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field

from simkv.workload.workload_base import StrictModel


def _of_the_web(address: str) -> str:
    """Return the address. Raises ValueError unless it begins with http:// or https://."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc or not address.isprintable():
        raise ValueError(f"must begin with http:// or https://, got {address!r}")
    return address


#: Types of scenario and variant names, web addresses, and positive times in seconds.
ScenarioName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Url = Annotated[str, AfterValidator(_of_the_web)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(StrictModel):
    """Base class of scenario sections. It rejects unknown fields, type coercion, infinities and
    NaN.
    """

    model_config = ConfigDict(allow_inf_nan=False)
