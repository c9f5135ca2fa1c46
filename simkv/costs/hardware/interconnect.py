"""The interconnect between the GPUs of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Interconnect:
    """The interconnect between GPUs: ``bandwidth`` (bytes/s per direction) and ``latency`` (s).

    If ``kind`` is not ``measured``, the bandwidth comes from a data sheet and the latency is 0.
    """

    kind: Literal["NVLink", "PCIe", "measured"]
    bandwidth: float
    latency: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether the values were measured on a host."""
        return self.kind == "measured"
