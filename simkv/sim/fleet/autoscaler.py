"""The target number of replicas in an autoscaled fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from simkv.scenario.fleet_section import Autoscale
from simkv.sim.fleet.routers import LoadSignal


class Autoscaler:
    """Kubernetes' rule: enough replicas for the metric's target, with delayed scale-down."""

    def __init__(self, rule: Autoscale) -> None:
        self.rule = rule
        self._wanted: deque[tuple[float, int]] = deque()

    def wanted(self, now: float, signals: Sequence[LoadSignal], coming: int, at_door: int) -> int:
        """Return the number of replicas that there should be.

        ``now`` is the time (s), ``signals`` the loads of replicas that accept requests, ``coming``
        the number of starting replicas, and ``at_door`` the number of requests that wait for a
        replica.
        """
        rule, there = self.rule, len(signals) + coming
        load: float = sum(getattr(signal, rule.metric) for signal in signals) + at_door
        want = ceil(load / rule.target)
        if there and abs(load / (there * rule.target) - 1.0) <= rule.tolerance:
            want = there
        want = min(max(want, rule.min_replicas), rule.max_replicas)
        self._wanted.append((now, want))
        while self._wanted[0][0] < now - rule.scale_down_after:
            self._wanted.popleft()
        if want >= there:
            return want
        return min(there, max(number for _, number in self._wanted))
