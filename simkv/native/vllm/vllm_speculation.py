"""Stub of the speculative decoding configuration that vLLM's scheduler reads."""

from __future__ import annotations

from typing import Any

from simkv.native.import_stubs import ConfigStub
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.versions import find_rules


class Speculation:
    """Speculative decoding settings of a test case.

    ``given`` contains properties that ``VllmConfig`` derives from these settings. Since 0.33, the
    hash of a block covers ``hash_lookahead`` tokens after it.
    """

    def __init__(self, config: VllmConfig) -> None:
        drafts, method = config.num_speculative_tokens, config.speculative_method
        eagle = config.drafts_from_states
        covers = find_rules(config.variant).keys_cover_next_token and config.enable_prefix_caching
        self.hash_lookahead = int(eagle and bool(covers))
        self.given: dict[str, Any] = {
            "num_speculative_tokens": drafts,
            "num_lookahead_tokens": 0 if method == "ngram" else drafts,
            "num_prefill_lookahead_tokens": int(eagle),
            "num_hash_lookahead_tokens": self.hash_lookahead,
        }
        if drafts:
            self.given["speculative_config"] = ConfigStub(
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
