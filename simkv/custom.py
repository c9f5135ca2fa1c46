"""Names to import in the file of a custom scheduler or policy.

from simkv.custom import Batch, CustomConfig, CustomScheduler, Held
"""

from __future__ import annotations

from simkv.scenario.custom import old_names
from simkv.scenario.custom.scheduler_template import (
    Batch,
    BlockPool,
    Completion,
    CustomConfig,
    CustomRequest,
    CustomScheduler,
    Held,
    Prompt,
    blocks_for,
)
from simkv.scenario.custom.vllm_policy import CustomVllmConfig, CustomVllmScheduler, PolicyRequest

__all__ = [
    "Batch",
    "BlockPool",
    "Completion",
    "CustomConfig",
    "CustomRequest",
    "CustomScheduler",
    "CustomVllmConfig",
    "CustomVllmScheduler",
    "Held",
    "PolicyRequest",
    "Prompt",
    "blocks_for",
]

#: Names in ``simkv.own`` that differ from the names here.
OLD_NAMES = old_names.OLD_NAMES
