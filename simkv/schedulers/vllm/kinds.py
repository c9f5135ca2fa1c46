"""Which kind of memory a model has."""

from __future__ import annotations

from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.holding import NotedMemory
from simkv.schedulers.vllm.lookahead import DraftMemory
from simkv.schedulers.vllm.memory import VllmMemory
from simkv.schedulers.vllm.rules import VllmRules
from simkv.schedulers.vllm.states import StateMemory
from simkv.schedulers.vllm.windows import WindowMemory


def memory_of(config: VllmConfig, rules: VllmRules, *, tables: bool) -> VllmMemory:
    """The memory that a model with these groups of layers, and this drafter, has."""
    if config.num_speculative_tokens:
        return DraftMemory(config, rules)
    if config.offloads:
        return NotedMemory(config, rules, tables=tables)
    if config.kv_cache_groups == (0,):
        return VllmMemory(config, rules, tables=tables)
    return StateMemory(config, rules) if config.has_states else WindowMemory(config, rules)
