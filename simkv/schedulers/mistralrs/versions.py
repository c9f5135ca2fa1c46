"""Differences between the revisions of mistral.rs's scheduler, as dataclass fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from simkv.core.scheduler_protocol import Variant


@dataclass(frozen=True)
class MistralrsRules:
    """Rules that differ between the variants. The variant ``seed`` does not use them."""

    #: Order of decodes by arrival time; victims of preemption are taken from the end of this order.
    decode_order: Literal["newest first", "oldest first"] = "newest first"
    #: Treatment of running sequences outside the length group that runs.
    unequal_decodes: Literal["preempt", "wait", "run together"] = "preempt"
    #: Length group that runs in a step.
    bucket: Literal["shortest", "oldest"] = "shortest"
    #: Whether prompts with and without images may be admitted in one call.
    mixed_prefill: bool = False
    #: Treatment of a running sequence whose modality differs from the first of the batch.
    mixed_decode: Literal["look again", "run together", "append"] = "look again"
    #: Eviction after the waiting timeout: one sequence, or sequences until the head of the queue
    #: fits.
    evict: Literal["one", "until it fits"] = "one"
    #: Whether ``prefill_batch_max_seqs`` and ``prefill_batch_max_tokens`` apply.
    prefill_limit: bool = False


BUCKETED = MistralrsRules()
RULES: Mapping[str, MistralrsRules] = {
    "bucketed": BUCKETED,
    "merged2250": replace(BUCKETED, decode_order="oldest first"),
    "pr2031a": replace(BUCKETED, unequal_decodes="run together", mixed_decode="run together"),
    "pr2031": replace(BUCKETED, unequal_decodes="wait"),
    "pr2034": MistralrsRules(
        decode_order="oldest first",
        unequal_decodes="run together",
        bucket="oldest",
        mixed_decode="append",
        evict="until it fits",
        prefill_limit=True,
    ),
    "pr2034july": MistralrsRules(decode_order="oldest first", bucket="oldest", mixed_prefill=True),
}
#: Rules that ``pr2034july`` reads; the methods that it overrides replace the other rules.
JULY_RULES = ("mixed_prefill", "evict", "prefill_limit")
VARIANTS: Mapping[str, Variant] = {
    "seed": Variant(
        "EricLBuehler/mistral.rs@b95c8ecb7 (2025-05-29, #1388)",
        "no length buckets; evicts the oldest request; livelock if the head of the queue "
        "waits too long",
    ),
    "bucketed": Variant(
        "EricLBuehler/mistral.rs@97708f210 (2026-03-14)",
        "only requests of one length run; all others are preempted and prefilled again",
    ),
    "pr2031a": Variant(
        "EricLBuehler/mistral.rs@0773c31ad (2026-03-25, first commit of #2031)",
        "decodes of all lengths run together",
    ),
    "pr2031": Variant(
        "EricLBuehler/mistral.rs@b8d859db1 (2026-03-25, head of #2031)",
        "decodes of other lengths wait and keep their KV",
    ),
    "pr2034": Variant(
        "EricLBuehler/mistral.rs@5e7dad2e9 (2026-04-02, #2034 as re-applied in #2047)",
        "oldest request first; no length buckets for decodes; prefill batches have a size limit",
    ),
    "pr2034july": Variant(
        "EricLBuehler/mistral.rs@72710c751 (2026-07-12, head of #2034)",
        "requests with the length of the oldest one run; others wait and keep their KV",
    ),
    "merged2250": Variant(
        "EricLBuehler/mistral.rs@bf86b7184 (2026-06-25, #2250)",
        "like bucketed, but the newest request is evicted first",
    ),
}
