"""What joins the GPUs of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Interconnect:
    """What joins the GPUs of a node: ``bandwidth`` in bytes/s each way, ``latency`` in s.

    ``measured``: both are figures of a host, of one message, as its all-reduce shows them; else
    they are those of a data sheet (latency 0).
    """

    kind: Literal["NVLink", "PCIe", "measured"]
    bandwidth: float
    latency: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether the figures are those of a host."""
        return self.kind == "measured"
