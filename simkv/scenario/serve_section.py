"""The ``serve`` section of a scenario: output lengths for ``simkv serve``."""

from __future__ import annotations

from simkv.scenario.base_section import Section
from simkv.workload.length_distributions import LengthDistribution


class ServeSection(Section):
    """Output lengths of answers to real clients; simulated runs ignore this section."""

    output_tokens: LengthDistribution | None = None
    """Distribution of output tokens per answer (default: as in the workload)."""
