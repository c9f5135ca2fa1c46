"""The target number of replicas in an autoscaled fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil, inf

from simkv.scenario.fleet_section import Autoscale
from simkv.sim.fleet.routers import LoadSignal


class Autoscaler:
    """Target number of replicas, by the rule of Kubernetes' horizontal autoscaler.

    The number is the sum of the metric over all replicas, divided by the target per replica. A
    decrease applies only after a delay.
    """

    def __init__(self, rule: Autoscale) -> None:
        self.rule = rule
        #: Recent (time, number) pairs, without pairs followed by a number at least as high. The
        #: first pair has the maximum, below which the fleet is not scaled down.
        self._wanted: deque[tuple[float, int]] = deque()
        #: The result does not change before this time (s) while the loads stay the same.
        self.steady_until = 0.0

    def target_size(
        self, now: float, signals: Sequence[LoadSignal], starting: int, unrouted: int
    ) -> int:
        """Return the target number of replicas.

        - ``now``: time in seconds.
        - ``signals``: loads of the replicas that accept requests.
        - ``starting``: number of starting replicas.
        - ``unrouted``: number of requests that wait for a replica.
        """
        rule, current = self.rule, len(signals) + starting
        load: float = sum(getattr(signal, rule.metric) for signal in signals) + unrouted
        want = ceil(load / rule.target)
        if current and abs(load / (current * rule.target) - 1.0) <= rule.tolerance:
            want = current
        want = min(max(want, rule.min_replicas), rule.max_replicas)
        while self._wanted and self._wanted[-1][1] <= want:
            self._wanted.pop()
        self._wanted.append((now, want))
        while self._wanted[0][0] < now - rule.scale_down_after:
            self._wanted.popleft()
        since, highest = self._wanted[0]
        self.steady_until = since + rule.scale_down_after if highest > want else inf
        return want if want >= current else min(current, highest)
