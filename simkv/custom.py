"""Names that the file of a custom scheduler imports.

from simkv.custom import Batch, CustomConfig, CustomScheduler, Held
"""

from __future__ import annotations

from simkv.scenario.own import old_names
from simkv.scenario.own.start import (
    Batch,
    BlockPool,
    Completion,
    Held,
    Prompt,
    blocks_for,
)
from simkv.scenario.own.start import OwnConfig as CustomConfig
from simkv.scenario.own.start import OwnRequest as CustomRequest
from simkv.scenario.own.start import OwnScheduler as CustomScheduler
from simkv.scenario.own.vllm import RuleView as PolicyRequest
from simkv.scenario.own.vllm import VllmKnobs as CustomVllmConfig
from simkv.scenario.own.vllm import VllmRule as CustomVllmScheduler

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

#: Names that ``simkv.own`` has for some of these.
OLD_NAMES = old_names.OLD_NAMES
