"""How many replicas there should be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from simkv.scenario.fleet_section import Autoscale
from simkv.sim.fleet.routers import LoadSignal


class Autoscaler:
    """Kubernetes' rule: as many as bring the metric down to its target, fewer only after a while.

    It is told the time in seconds, how loaded the replicas that take requests are, how many are
    on their way, and how many requests wait for one.
    """

    def __init__(self, rule: Autoscale) -> None:
        self.rule = rule
        self._wanted: deque[tuple[float, int]] = deque()

    def wanted(self, now: float, signals: Sequence[LoadSignal], coming: int, at_door: int) -> int:
        """How many replicas there should be."""
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
