"""Measured links between the GPUs of a host. Hosts with the same GPUs may have different links.

``links.json`` lists the links by interconnect and peer-to-peer setting, each with its source.
Without peer-to-peer access, all data passes through host memory.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from simkv.core.errors import InputError, spelling_hint
from simkv.costs.frozen_model import FrozenModel

#: Message sizes in bytes for which durations are tabulated.
SIZES = tuple(2**n for n in range(12, 27))


class HostLink(FrozenModel):
    """A link between the GPUs of a host, measured with all-reduce operations.

    ``latency`` is the duration of the smallest all-reduce in seconds. ``bandwidth`` is in bytes/s
    per GPU and direction. ``peer_to_peer`` is None if unknown.
    """

    name: str
    interconnect: str = "measured"
    peer_to_peer: bool | None = None
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    source: str

    @property
    def said(self) -> str:
        """Name, latency, bandwidth and source of the link as text."""
        return (
            f"{self.name}, {1e6 * self.latency:g} us and {self.bandwidth / 1e9:g} GB/s "
            f"({self.source})"
        )

    def times(self, collective: str, ranks: int) -> list[tuple[int, float]]:
        """Estimate the durations of a ring collective on ``ranks`` GPUs, as pairs of bytes and
        seconds.

        For an all-reduce, the bytes are the size of the whole message. For other collectives, they
        are the size of one GPU's data.
        """
        trips = 2 * (ranks - 1) / ranks if collective == "all_reduce" else float(ranks - 1)
        return [(size, self.latency + trips * size / self.bandwidth) for size in SIZES]


@lru_cache(maxsize=1)
def links() -> tuple[HostLink, ...]:
    """Return all links in ``links.json``."""
    text = (Path(__file__).parent / "links.json").read_text(encoding="utf-8")
    return tuple(TypeAdapter(list[HostLink]).validate_python(json.loads(text)))


def find_link(name: str) -> HostLink:
    """Return the link with the given name. Raises InputError if it is unknown."""
    names = [link.name for link in links()]
    for link in links():
        if link.name.casefold() == name.casefold():
            return link
    raise InputError(
        f"unknown link {name!r}{spelling_hint(name, names)}; expected one of "
        f"{', '.join(names)}, or "
        f"latency_us and bandwidth_gb_s"
    )


def parse_link(text: str) -> HostLink:
    """Parse a link: a name, or latency (us) and bandwidth (GB/s) such as ``20,16``.

    Raises InputError for other text.
    """
    figures = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*,\s*(\d+(?:\.\d+)?)\s*", text)
    if figures is None or not float(figures[2]):
        return find_link(text)
    latency, bandwidth = 1e-6 * float(figures[1]), 1e9 * float(figures[2])
    return HostLink(name="host link", latency=latency, bandwidth=bandwidth, source="specified")
