"""Interconnect between the GPUs of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Interconnect:
    """Interconnect between GPUs: ``bandwidth`` in bytes/s per direction, ``latency`` in s.

    Both values are measured with single all-reduce messages if the kind is ``measured``. Otherwise
    they come from data sheets, and the latency is 0.
    """

    kind: Literal["NVLink", "PCIe", "measured"]
    bandwidth: float
    latency: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether the values were measured on a host."""
        return self.kind == "measured"
