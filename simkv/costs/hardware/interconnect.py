"""Interconnect between the GPUs of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Interconnect:
    """Interconnect of a node's GPUs: ``bandwidth`` in bytes/s per direction, ``latency`` in s.

    Kind ``measured``: both values come from the all-reduce of a host, for single messages. Other
    kinds have data-sheet values (latency 0).
    """

    kind: Literal["NVLink", "PCIe", "measured"]
    bandwidth: float
    latency: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether the values were measured on a host."""
        return self.kind == "measured"
