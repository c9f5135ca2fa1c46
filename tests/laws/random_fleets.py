"""Random fleets around the random scenarios of every engine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from simkv.scenario.scenario import Scenario
from tests.laws.random_scenarios import (
    ENGINES,
    KNOBS,
    Draw,
    _whole,
    rarely,
    scenarios,
)

WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 4.0])


def _router(draw: Draw) -> dict[str, Any]:
    names = ("round_robin", "random", "least_loaded", "power_of_two", "session", "cache_aware")
    name = draw(st.sampled_from((*names, "weighted")))
    knobs: dict[str, Any] = {"name": name}
    if name in ("random", "power_of_two", "weighted"):
        knobs["seed"] = draw(_whole(0, 3))
    if name in ("least_loaded", "power_of_two"):
        for weight in ("waiting_weight", "running_weight", "in_flight_weight", "kv_weight"):
            knobs[weight] = draw(WEIGHTS)
        knobs["count_own_sends"] = draw(st.booleans())
    if name in ("session", "cache_aware"):
        knobs["balance_abs_threshold"] = float(draw(_whole(0, 3)))
    if name == "session":
        knobs["max_in_flight"] = draw(st.sampled_from([None, 1, 3]))
    if name == "weighted":
        for weight in ("queue_weight", "kv_weight", "prefix_weight"):
            knobs[weight] = draw(WEIGHTS)
        knobs["count_own_sends"] = draw(st.booleans())
    if name in ("cache_aware", "weighted"):
        knobs["block_size"] = draw(st.sampled_from([1, 4]))
    return knobs


def _admission(draw: Draw) -> dict[str, Any]:
    return {
        "name": "session_admission",
        "capacity_tokens": draw(st.sampled_from([1, 30, 200])),
        "half_life": draw(st.sampled_from([None, 0.5])),
        "buffer_tokens": draw(st.sampled_from([0, 5])),
        "interval": draw(st.sampled_from([0.5, 5.0])),
        "forced_after": draw(st.sampled_from([1.0, 20.0])),
        "first_estimate": draw(st.sampled_from([0.5, 1.0])),
    }


def _replicas(draw: Draw, scenario: Scenario) -> Any:
    loras = any(request.lora for request in scenario.workload.requests or ())
    if loras or draw(st.booleans()):  # other engines may not support adapters
        return draw(_whole(1, 4))
    groups: list[dict[str, Any]] = [{"count": draw(_whole(1, 2))}]
    engine, variant = draw(st.sampled_from(ENGINES))
    groups.append(
        {
            "count": draw(_whole(1, 2)),
            "engine": {"name": engine, "variant": variant, **KNOBS[engine](draw, variant)},
            "profile": draw(st.sampled_from([None, "unit-step", "l4-mistralrs-pr2034"])),
        }
    )
    return groups


@st.composite
def fleets(draw: Draw, engine: str, variant: str) -> Scenario:
    """Return a scenario with a fleet of up to four replicas, possibly of different engines."""
    scenario = draw(scenarios(engine, variant))
    section = {
        "replicas": _replicas(draw, scenario),
        "router": _router(draw),
        "refresh_interval": draw(rarely(st.sampled_from([0.3, 1.0, 2.5]))) or 0.0,
        "failures": draw(rarely(outages())) or [],
        "drains": draw(rarely(outages())) or [],
        "on_failure": draw(st.sampled_from(["retry", "retry", "lose"])),
        "cold_start": draw(rarely(st.sampled_from([0.5, 3.0]))) or 0.0,
        "start_cold": draw(rarely(st.just(value=True))) or False,
    }
    if draw(rarely(st.just(value=True))):
        section |= {"router": _admission(draw), "failures": [], "drains": [], "start_cold": False}
    elif isinstance(section["replicas"], int):
        section["autoscale"] = draw(rarely(_autoscale(section["replicas"])))
    if most := draw(rarely(_whole(1, 3))):
        workload = scenario.workload.model_copy(update={"max_concurrency": most})
        scenario = scenario.model_copy(update={"workload": workload})
    return with_fleet(scenario, section)


@st.composite
def outages(draw: Draw) -> list[dict[str, Any]]:
    """Return at most one outage of each replica that exists in any case."""
    at = draw(st.sampled_from([0.0, 0.3, 2.0, 5.0]))
    back = draw(st.sampled_from([None, 0.4, 3.0]))
    return [{"replica": 0, "at": at, "back_at": None if back is None else at + back}]


@st.composite
def _autoscale(draw: Draw, replicas: int) -> dict[str, Any]:
    return {
        "metric": draw(st.sampled_from(["waiting", "running", "in_flight"])),
        "target": draw(st.sampled_from([1.0, 2.5])),
        "min_replicas": draw(_whole(1, replicas)),
        "max_replicas": draw(_whole(replicas, 4)),
        "interval": draw(st.sampled_from([0.5, 2.0])),
        "lag": draw(st.sampled_from([0.0, 1.0])),
        "scale_down_after": draw(st.sampled_from([0.0, 4.0])),
    }


def with_fleet(scenario: Scenario, section: dict[str, Any]) -> Scenario:
    """Return the scenario with a ``fleet`` section."""
    model = type(scenario).model_fields["fleet"].annotation
    from pydantic import TypeAdapter

    return scenario.model_copy(update={"fleet": TypeAdapter(model).validate_python(section)})
