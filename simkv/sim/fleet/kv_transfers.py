"""KV transfers from prefill replicas to decode replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simkv.core.request import Request
from simkv.scenario.fleet_section import KvTransfer


@dataclass
class Handover:
    """A request between two replicas, given by the indices of their lifetimes; times in seconds.

    Its prompt was computed at ``prefilled_at``. ``tokens`` tokens of KV were requested at
    ``requested_at``, when blocks for them were allocated, and had arrived at ``arrived_at``.
    """

    request: Request
    source: int
    target: int
    prefilled_at: float
    requested_at: float | None = None
    arrived_at: float | None = None
    tokens: int = 0


class TransferLinks:
    """Transfer times of KV. Transfers over one link are sequential, at full bandwidth.

    Each prefill replica has its own link, unless all share one.
    """

    def __init__(self, rule: KvTransfer) -> None:
        self.rule = rule
        self._free_at: dict[int, float] = {}

    def send(self, source: int, tokens: int, now: float) -> float:
        """Start a transfer of ``tokens`` of KV at ``now`` (s); return its arrival time (s)."""
        link = -1 if self.rule.shared_link else source
        start = max(now, self._free_at.get(link, 0.0))
        end = start + tokens * self.rule.bytes_per_token / self.rule.bandwidth
        self._free_at[link] = end
        return end + self.rule.latency


def prefill_request(request: Request) -> Request:
    """Return the request for the prefill replica: the same prompt and one token."""
    return replace(request, output_tokens=1, max_tokens=1)
