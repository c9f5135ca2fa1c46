"""A fleet that loses one replica when that hurts most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkv.scenario.fleet_section import Outage
from simkv.scenario.scenario import Scenario


def with_failure(scenario: Scenario, peak: Mapping[str, Any]) -> Scenario:
    """The scenario with one replica failing for good at the ``peak`` of a run without.

    That is when the most requests are in flight, and the replica that has the most of them. What
    becomes of them is said by the fleet's ``on_failure``.
    """
    fleet = scenario.fleet
    assert fleet is not None
    outage = Outage(replica=peak["replica"], at=peak["at_s"])
    failing = fleet.model_copy(update={"failures": [*fleet.failures, outage]})
    return scenario.model_copy(update={"fleet": failing})
