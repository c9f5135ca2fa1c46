"""What joins the GPUs of a host: cards of one kind are joined in more than one way.

``links.json`` has links by interconnect and peer-to-peer setting, each with its source. Where
peer-to-peer is off (another driver, a board or a virtual machine that does not let it), all bytes
go through the host's memory.
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

#: Sizes (bytes) at which times over a link are written down.
SIZES = tuple(2**n for n in range(12, 27))


class HostLink(FrozenModel):
    """``latency`` (s) of the smallest all-reduce and ``bandwidth`` (bytes/s) of one GPU each way,
    as a host's all-reduce shows them."""

    name: str
    interconnect: str = "measured"
    peer_to_peer: bool | None = None
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    source: str

    @property
    def said(self) -> str:
        """The link in words."""
        return (
            f"{self.name}, {1e6 * self.latency:g} us and {self.bandwidth / 1e9:g} GB/s "
            f"({self.source})"
        )

    def times(self, collective: str, ranks: int) -> list[tuple[int, float]]:
        """``[bytes, seconds]`` of a ring: an all-reduce sends everything round twice. Bytes are
        those of the whole message of an all-reduce, of one GPU's part of the others."""
        trips = 2 * (ranks - 1) / ranks if collective == "all_reduce" else float(ranks - 1)
        return [(size, self.latency + trips * size / self.bandwidth) for size in SIZES]


@lru_cache(maxsize=1)
def links() -> tuple[HostLink, ...]:
    """All links that are known."""
    text = (Path(__file__).parent / "links.json").read_text(encoding="utf-8")
    return tuple(TypeAdapter(list[HostLink]).validate_python(json.loads(text)))


def find_link(name: str) -> HostLink:
    """A link by its name. Raises InputError if it is not known."""
    names = [link.name for link in links()]
    for link in links():
        if link.name.casefold() == name.casefold():
            return link
    raise InputError(
        f"link {name!r} is not known{spelling_hint(name, names)}; expected one of "
        f"{', '.join(names)}, or "
        f"latency_us and bandwidth_gb_s"
    )


def parse_link(text: str) -> HostLink:
    """A link by its name, or by its latency (us) and bandwidth (GB/s) as ``20,16``.

    Raises InputError for what is neither.
    """
    figures = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*,\s*(\d+(?:\.\d+)?)\s*", text)
    if figures is None or not float(figures[2]):
        return find_link(text)
    latency, bandwidth = 1e-6 * float(figures[1]), 1e9 * float(figures[2])
    return HostLink(name="the host's link", latency=latency, bandwidth=bandwidth, source="as given")
