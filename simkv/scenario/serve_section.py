"""The ``serve`` section of a scenario: lengths of answers for ``simkv serve``."""

from __future__ import annotations

from simkv.scenario.base_section import Section
from simkv.workload.length_distributions import LengthDistribution


class ServeSection(Section):
    """Lengths of answers to real clients; ignored by runs."""

    output_tokens: LengthDistribution | None = None
    """Distribution of output tokens per answer (default: as in the workload)."""
