"""The starvation zoo: packaged scenarios that reproduce public incidents, by name.

for incident in find_incidents():
    print(incident.name, [check for check in replay_incident(incident) if not check.ok])
"""

from __future__ import annotations

from collections.abc import Callable

from simkv.metrics.expectation_checks import ExpectationCheck, check_expectations
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.packaged_scenarios import PackagedIncident


def replay_incident(
    incident: PackagedIncident, resolved: Callable[[], None] | None = None
) -> list[ExpectationCheck]:
    """Run all variants of an incident and check its expected results.

    ``resolved`` is called whenever a request ends.
    """
    return check_expectations(
        {
            name: run_scenario(variant, incident.path.parent, resolved)
            for name, variant in incident.variants.items()
        }
    )
