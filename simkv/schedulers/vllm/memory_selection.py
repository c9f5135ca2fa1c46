# mypyc: compile
"""Selection of the class that manages KV blocks for a configuration."""

from __future__ import annotations

from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.draft_memory import DraftMemory
from simkv.schedulers.vllm.memory import VllmMemory
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.remote_kv_queue import TakenBlocksMemory
from simkv.schedulers.vllm.state_memory import StateMemory
from simkv.schedulers.vllm.window_memory import WindowMemory


def build_memory(config: VllmConfig, rules: VllmRules, *, tables: bool) -> VllmMemory:
    """Build the block memory for the configured layer groups, drafter and KV offloading.

    With ``tables``, blocks have ids even if no feature needs them.
    """
    if config.num_speculative_tokens:
        return DraftMemory(config, rules)
    if config.offloads:
        return TakenBlocksMemory(config, rules, tables=tables)
    if config.kv_cache_groups == (0,):
        return VllmMemory(config, rules, tables=tables)
    return StateMemory(config, rules) if config.has_states else WindowMemory(config, rules)
