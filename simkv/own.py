"""What the file of a scheduler of one's own imports.

from simkv.own import Batch, Held, OwnConfig, OwnScheduler
"""

from __future__ import annotations

from simkv.scenario.own.start import (
    Batch,
    BlockPool,
    Completion,
    Held,
    OwnConfig,
    OwnRequest,
    OwnScheduler,
    Prompt,
    blocks_for,
)
from simkv.scenario.own.vllm import RuleView, VllmKnobs, VllmRule

__all__ = [
    "Batch",
    "BlockPool",
    "Completion",
    "Held",
    "OwnConfig",
    "OwnRequest",
    "OwnScheduler",
    "Prompt",
    "RuleView",
    "VllmKnobs",
    "VllmRule",
    "blocks_for",
]
