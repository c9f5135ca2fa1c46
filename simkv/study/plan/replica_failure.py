"""Add the worst-case failure of one replica to a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkv.scenario.fleet_section import Outage
from simkv.scenario.scenario import Scenario


def with_failure(scenario: Scenario, peak: Mapping[str, Any]) -> Scenario:
    """Return the scenario with one replica failing permanently at the ``peak`` of a run without.

    The peak is the time with the most requests in flight, and the replica is the one with the most
    of them. The fleet's ``on_failure`` determines how they continue.
    """
    fleet = scenario.fleet
    assert fleet is not None
    outage = Outage(replica=peak["replica"], at=peak["at_s"])
    failing = fleet.model_copy(update={"failures": [*fleet.failures, outage]})
    return scenario.model_copy(update={"fleet": failing})
