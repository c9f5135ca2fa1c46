"""What ``simkv serve`` needs to know beyond a run: how the answers to its clients are."""

from __future__ import annotations

from simkv.scenario.base_section import Section
from simkv.workload.length_distributions import LengthDistribution


class ServeSection(Section):
    """How answers are for real clients, who tell nothing of it; a run does not look at it."""

    output_tokens: LengthDistribution | None = None
    """How many tokens an answer has that ends by itself; left out, as many as in the workload."""
