"""The ``plan`` section of a scenario file: what ``simkv plan`` looks for, if nothing else is said.

plan:
  smallest: fleet.replicas=1..20
  objectives: [ttft_ms.p99<=500, longest_stall_s<=2]
  goodput: {ttft: 500, tpot: 50}
  survive: 1
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from simkv.core.errors import InputError
from simkv.scenario.limits import parse_limits
from simkv.scenario.objectives import parse_objective


def _objective(text: str) -> str:
    try:
        parse_objective(text)
    except InputError as error:
        raise ValueError(_without_option(error, text)) from error
    return text


def _limits(limits: dict[str, float]) -> dict[str, float]:
    for name, limit in limits.items():
        word = f"{name}:{limit:g}"
        try:
            parse_limits([word])
        except InputError as error:
            raise ValueError(_without_option(error, word)) from error
    return limits


def _without_option(error: InputError, text: str) -> str:
    """The message without the name of the option, for the place is in the file."""
    return str(error).partition(f"{text}: ")[2]


class PlanSection(BaseModel):
    """Defaults of ``simkv plan`` for this scenario; its options of the same names go first.

    ``smallest`` or ``largest`` is a knob and its candidates as for ``--over``. ``survive`` so many
    replicas that fail, 0 or 1. ``prices`` is a file beside the scenario.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    smallest: str | None = None
    largest: str | None = None
    objectives: list[Annotated[str, AfterValidator(_objective)]] = []
    goodput: Annotated[dict[str, float], AfterValidator(_limits)] = {}
    survive: Annotated[int, Field(ge=0, le=1)] = 0
    repeats: Annotated[int, Field(gt=0)] | None = None
    profile_error: Annotated[float, Field(ge=0, lt=1)] | None = None
    prices: str | None = None
    gpu: str | None = None
    gpus_per_replica: Annotated[int, Field(gt=0)] = 1
