"""The ``plan`` section of a scenario file: what ``simkv plan`` looks for, if nothing else is said.

plan:
  smallest: fleet.replicas=1..20
  objectives: [ttft_ms.p99<=500, longest_stall_s<=2]
  goodput: {ttft: 500, tpot: 50}
  survive: 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from simkv.core.errors import InputError
from simkv.scenario.limits import parse_limits
from simkv.scenario.objectives import parse_objective


@dataclass(frozen=True)
class Flag:
    """How the command line calls a field, if not by its name, and what stands for its value."""

    name: str | None = None
    metavar: str | None = None


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

    smallest: Annotated[
        str | None,
        Flag(metavar="PATH=VALUES"),
        Field(
            description="The knob of which as little as possible is wanted, and its candidates: "
            "fleet.replicas=1..20, engine.num_gpu_blocks=256..8192:64; see 'simkv sweep --over'."
        ),
    ] = None
    largest: Annotated[
        str | None,
        Flag(metavar="PATH=VALUES"),
        Field(
            description="The knob of which as much as possible is wanted, as a rate: "
            "workload.rate_scale=0.5..8:0.25."
        ),
    ] = None
    objectives: Annotated[
        list[Annotated[str, AfterValidator(_objective)]],
        Flag("--slo", "FIGURE<=NUMBER"),
        Field(
            description="An objective, as 'ttft_ms.p99<=500' or 'jain_index>=0.5'; in quotes. May "
            "be repeated. That everybody is served is assumed unless something is said about it."
        ),
    ] = []
    goodput: Annotated[
        dict[str, float],
        AfterValidator(_limits),
        Flag(metavar="ttft:MS tpot:MS e2el:MS"),
        Field(
            description="Limits per request as in 'vllm bench serve'. Of all requests 99 % must "
            "keep to them unless an objective bounds goodput (per second) or goodput_share."
        ),
    ] = {}
    survive: Annotated[
        int,
        Field(ge=0, le=1, description="Also with so many replicas failing when that is worst."),
    ] = 0
    repeats: Annotated[
        int | None,
        Field(ge=1, description="Seeds; default 6 where the workload is drawn by chance."),
    ] = None
    profile_error: Annotated[
        float | None,
        Flag(metavar="SHARE"),
        Field(
            ge=0,
            le=0.9,
            description="Relative error of a step (0.1: a tenth), if the profile tells none or "
            "another.",
        ),
    ] = None
    prices: Annotated[
        str | None,
        Flag(metavar="FILE"),
        Field(description="Prices of a GPU hour, YAML 'H100: 2.5' or CSV."),
    ] = None
    gpu: Annotated[str | None, Field(description="Which GPU; default that of the profile.")] = None
    gpus_per_replica: Annotated[
        int | None,
        Field(ge=1, description="How many GPUs make a replica; default what hardware says, or 1."),
    ] = None
