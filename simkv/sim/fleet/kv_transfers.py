"""KV on its way from the replica that prefilled to the one that decodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simkv.core.request import Request
from simkv.scenario.fleet_section import KvTransfer


@dataclass
class Handover:
    """A request between two replicas, by the places of their stints; times in seconds.

    Its prompt was computed at ``ready``; ``tokens`` of KV were asked for at ``asked``, when there
    were blocks for them, and were there at ``there``.
    """

    request: Request
    source: int
    target: int
    ready: float
    asked: float | None = None
    arrived_at: float | None = None
    tokens: int = 0


class TransferLinks:
    """When transfers end. What is sent over one link goes one after the other, at full speed.

    Every replica that prefills has a link of its own, unless all share one.
    """

    def __init__(self, rule: KvTransfer) -> None:
        self.rule = rule
        self._free_at: dict[int, float] = {}

    def send(self, source: int, tokens: int, now: float) -> float:
        """When ``tokens`` of KV that leave ``source`` from ``now`` on are there (s)."""
        link = -1 if self.rule.shared_link else source
        start = max(now, self._free_at.get(link, 0.0))
        end = start + tokens * self.rule.bytes_per_token / self.rule.bandwidth
        self._free_at[link] = end
        return end + self.rule.latency


def prefill_request(request: Request) -> Request:
    """What the replica that prefills is asked for: the prompt and one token."""
    return replace(request, output_tokens=1, max_tokens=1)
