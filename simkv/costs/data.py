"""What costs and facts are made of: checked, unchangeable data without unknown fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Data(BaseModel):
    """Data as read from JSON: no field that is not known, no number that is not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
