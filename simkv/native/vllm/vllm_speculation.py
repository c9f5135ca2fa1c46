"""Stub of the speculative decoding configuration that vLLM's scheduler reads."""

from __future__ import annotations

from typing import Any

from simkv.native.import_stubs import ConfigStub
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.versions import find_rules


def speculation_fields(config: VllmConfig) -> dict[str, Any]:
    """Return the fields of vLLM's configuration that depend on speculative decoding.

    Since 0.33, the hash of a block covers ``num_hash_lookahead_tokens`` tokens after it.
    """
    drafts, method = config.num_speculative_tokens, config.speculative_method
    eagle = config.drafts_from_states
    covers = find_rules(config.variant).keys_cover_next_token and config.enable_prefix_caching
    speculative = ConfigStub(
        method=method,
        num_speculative_tokens=drafts,
        use_eagle=lambda: eagle,
        use_eagle_block_drop=lambda: eagle,
        needs_eagle_block_drop=lambda: eagle,
        uses_draft_model=lambda: method == "draft_model",
        use_multi_module_mtp=lambda: False,
        use_dflash=lambda: False,
        use_dspark=lambda: False,
        max_num_new_slots_for_drafting=config.draft_slots,
    )
    return {
        "num_speculative_tokens": drafts,
        "num_lookahead_tokens": 0 if method == "ngram" else drafts,
        "num_prefill_lookahead_tokens": int(eagle),
        "num_hash_lookahead_tokens": int(eagle and bool(covers)),
        "speculative_config": speculative if drafts else None,
    }
