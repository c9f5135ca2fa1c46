"""The ``plan`` section of a scenario file: defaults of ``simkv plan``.

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
from simkv.scenario.goodput_limits import parse_goodput_limits
from simkv.scenario.objectives import parse_objective


@dataclass(frozen=True)
class PlanOption:
    """Name and metavar of the command-line option for a field.

    ``name`` is None if the option has the name of the field.
    """

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
            parse_goodput_limits([word])
        except InputError as error:
            raise ValueError(_without_option(error, word)) from error
    return limits


def _without_option(error: InputError, text: str) -> str:
    """Return the message without the option's name, because the value is in the file."""
    return str(error).partition(f"{text}: ")[2]


class PlanSection(BaseModel):
    """Defaults of ``simkv plan`` for this scenario. Command-line options override them.

    ``smallest`` is a setting to minimize, and ``largest`` is a setting to maximize, with candidate
    values in the syntax of ``--over``. ``survive`` is the number of replicas that may fail, 0 or 1.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    smallest: Annotated[
        str | None,
        PlanOption(metavar="PATH=VALUES"),
        Field(
            description="Setting to minimize, with its candidate values, such as "
            "fleet.replicas=1..20 or engine.num_gpu_blocks=256..8192:64. Values are "
            "written as for 'simkv sweep --over'."
        ),
    ] = None
    largest: Annotated[
        str | None,
        PlanOption(metavar="PATH=VALUES"),
        Field(
            description="Setting to maximize, with its candidate values, such as "
            "workload.rate_scale=0.5..8:0.25."
        ),
    ] = None
    objectives: Annotated[
        list[Annotated[str, AfterValidator(_objective)]],
        PlanOption("--slo", "METRIC<=NUMBER"),
        Field(
            description="Objective in quotes, such as 'ttft_ms.p99<=500' or 'jain_index>=0.5'; "
            "may be repeated. Every request must be served, unless an objective "
            "allows unserved requests."
        ),
    ] = []
    goodput: Annotated[
        dict[str, float],
        AfterValidator(_limits),
        PlanOption(metavar="ttft:MS tpot:MS e2el:MS"),
        Field(
            description="Latency limits per request in milliseconds, as in 'vllm bench serve'. "
            "99 % of requests must meet them, unless an objective sets a bound on "
            "goodput (requests per second) or goodput_share."
        ),
    ] = {}
    survive: Annotated[
        int,
        Field(
            ge=0,
            le=1,
            description="Number of replicas (0 or 1) that may fail, at the worst moment, while the "
            "objectives are still met.",
        ),
    ] = 0
    repeats: Annotated[
        int | None,
        Field(
            ge=1,
            description="Number of random seeds (default: 6 if the workload is random, otherwise "
            "1).",
        ),
    ] = None
    profile_error: Annotated[
        float | None,
        PlanOption(metavar="SHARE"),
        Field(
            ge=0,
            le=0.9,
            description="Relative error of step times, such as 0.1 (default: the error stated in "
            "the cost profile).",
        ),
    ] = None
    prices: Annotated[
        str | None,
        PlanOption(metavar="FILE[#NAME]"),
        Field(
            description="File with prices per GPU hour: YAML such as 'H100: 2.5', or CSV. '#NAME' "
            "selects an entry (default: the entry for the GPU of the scenario)."
        ),
    ] = None
    gpus_per_replica: Annotated[
        int | None,
        Field(
            ge=1,
            description="Number of GPUs per replica (default: the number in hardware, otherwise "
            "1).",
        ),
    ] = None
