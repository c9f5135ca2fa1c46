"""The starvation zoo: the packaged scenarios of public incidents, by name.

for incident in incidents():
    print(incident.name, [check for check in replay(incident) if not check.ok])
"""

from __future__ import annotations

from collections.abc import Callable

from simkv.measure.expect import Check, check
from simkv.measure.simulate import run_scenario
from simkv.scenario.packaged import Incident


def replay(incident: Incident, resolved: Callable[[], None] | None = None) -> list[Check]:
    """Run all variants of an incident and check what is expected of them.

    ``resolved`` is called whenever a request ends.
    """
    return check(
        {
            name: run_scenario(variant, incident.path.parent, resolved)
            for name, variant in incident.variants.items()
        }
    )
