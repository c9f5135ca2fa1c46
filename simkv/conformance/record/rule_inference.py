"""Find the rules that reproduce a recording, among releases and combinations of their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
from typing import Any, TypeVar, cast

from simkv.conformance.decision_replay import Mismatch, compare, replay_decisions
from simkv.conformance.decision_trace import DecisionTrace
from simkv.schedulers.engine_registry import ENGINES
from simkv.schedulers.sglang import versions as sglang_versions
from simkv.schedulers.vllm.versions import RELEASED as VLLM_RELEASES
from simkv.schedulers.vllm.versions import RULES, find_rules

#: Rules that a recording can show; the others concern start-up and defaults, which it states.
OBSERVABLE_RULES: dict[str, tuple[str, ...]] = {
    "vllm": (
        "keyless_first",
        "threshold_spares_lone",
        "two_budgets",
        "goes_on",
        "finds_next",
        "drops_victims",
        "counts_victims",
        "breaks_ties",
        "sees_the_end",
        "skip_blocked",
        "counts_all_loras",
        "turns_skipped",
        "skipped_apart",
        "frees_processed",
        "keeps_boundaries",
        "keeps_aligned",
        "keyless_windows",
        "frees_gaps",
        "starts_at_junctions",
        "keeps_junctions",
        "wide_states",
        "leaves_last",
        "marks_again",
    ),
    "sglang": sglang_versions.OBSERVABLE_RULES,
}

#: Rules about drafts; combinations of them are not tried.
DRAFT_RULES = (
    "slots_of_budget",
    "slots_by_request",
    "pads_drafts",
    "pads_with_room",
    "pads_hits",
    "lookahead_at_admission",
    "drafts_for_chunks",
    "keeps_drafts",
    "caches_accepted",
    "keys_cover_next",
    "keeps_replays",
    "peeks_at_last",
)

#: Rules about blocks in host memory; combinations of them are not tried either.
HOST_MEMORY_RULES = (
    "holds_apart",
    "spares_computing",
    "stores_at_end",
    "keeps_stored",
    "keeps_ended",
    "counts_left",
    "offers_again",
    "uses_at_end",
    "ranks_requests",
    "evicts_either",
)

#: Rules about KV of other replicas; combinations of them are not tried either.
TRANSFER_RULES = (
    "reserves_loads",
    "caches_loaded",
    "keeps_for_loads",
    "frees_when_done",
    "drops_under_way",
)

#: The released rules, the newest first.
RELEASED_RULES: Mapping[str, Mapping[str, Any]] = {
    "vllm": {name: RULES[name] for name in VLLM_RELEASES},
    "sglang": {name: sglang_versions.RULES[name] for name in sglang_versions.RELEASES},
}

#: Maximum number of rules that may differ from the newest release.
MAX_CHANGED_RULES = 4

#: The knob that a release needs to show a rule.
REQUIRED_KNOB = {
    "two_budgets": "max_num_scheduled_tokens",
    "sees_the_end": "async_scheduling",
    "counts_all_loras": "async_scheduling",
    **dict.fromkeys(("frees_processed", "keeps_boundaries", "keeps_aligned"), "kv_cache_groups"),
    **dict.fromkeys(("keeps_junctions", "wide_states", "leaves_last"), "kv_cache_groups"),
    "marks_again": "kv_cache_groups",
    **dict.fromkeys(("keyless_windows", "starts_at_junctions", "frees_gaps"), "kv_cache_groups"),
    **dict.fromkeys(DRAFT_RULES, "num_speculative_tokens"),
    **dict.fromkeys(HOST_MEMORY_RULES, "num_cpu_blocks"),
    **dict.fromkeys(TRANSFER_RULES, "kv_connector"),
    **dict.fromkeys(("goes_on", "finds_next", "drops_victims", "breaks_ties"), "policy"),
    "counts_victims": "policy",
}


Rules = TypeVar("Rules")


def can_show(version: str, rule: str) -> bool:
    """Whether a release can show a rule; some rules need a knob that the release does not have.

    Some rules show only if another rule does not hold. If tokens in flight count as computed, all
    states before them are freed in time. Draft slots that are deducted in advance suffice for all
    requests. A request whose KV has arrived is admitted at once unless there is a watermark.
    """
    rules = find_rules(version)
    hidden = {
        "frees_gaps": not rules.frees_processed,
        "keyless_windows": rules.keyless_first,
        "starts_at_junctions": rules.keeps_junctions,
        "caches_loaded": "watermark" in rules.fixed,
        "counts_victims": rules.drops_victims,
    }
    if hidden.get(rule):
        return False
    if rule in ("pads_with_room", "pads_hits") and not rules.pads_drafts:
        return False
    if rule.startswith("slots_") and "draft_model" not in rules.draft_methods:
        return False
    if rule == "slots_by_request" and rules.slots_of_budget:
        return False
    return REQUIRED_KNOB.get(rule) not in rules.fixed


def observable_rules(trace: DecisionTrace) -> list[str]:
    """Return the ``OBSERVABLE_RULES`` whose knob, if any, is not at its default in a recording."""
    engine = trace.header["engine"]
    config = ENGINES[engine].recording.config(trace.header)
    plain = {field.name for field in fields(config) if getattr(config, field.name) == field.default}
    return [rule for rule in OBSERVABLE_RULES[engine] if REQUIRED_KNOB.get(rule) not in plain]


def find_mismatch(trace: DecisionTrace, rules: Any) -> Mismatch | None:
    """Return the first difference of a recording from its engine's scheduler with ``rules``, or
    None.

    If ``rules`` is None, the rules of the recording's variant apply.
    """
    spec = ENGINES[trace.header["engine"]]
    if rules is not None:
        spec = replace(spec, build=partial(spec.build, rules=rules))
    try:
        return compare(trace, replay_decisions(spec, trace.header, len(trace.steps)))[1]
    except Exception as error:  # incompatible rules may fail anywhere
        return Mismatch("?", {}, {"raised": repr(error)})


def distinct_releases(engine: str) -> dict[str, Any]:
    """Return the distinct rules of releases, each under the newest release that has them."""
    newest: dict[tuple[bool, ...], str] = {}
    seen = (
        *OBSERVABLE_RULES[engine],
        *((*DRAFT_RULES, *HOST_MEMORY_RULES, *TRANSFER_RULES) if engine == "vllm" else ()),
    )
    for name, rules in RELEASED_RULES[engine].items():
        newest.setdefault(tuple(getattr(rules, rule) for rule in seen), name)
    return {name: RELEASED_RULES[engine][name] for name in newest.values()}


def rule_combinations(engine: str, rules: Any) -> Iterator[tuple[Mapping[str, bool], Any]]:
    """Yield combinations of observable rules, each as its changes to ``rules`` and the result.

    Combinations with the fewest changes come first, up to ``MAX_CHANGED_RULES``.
    """
    for count in range(1, min(len(OBSERVABLE_RULES[engine]), MAX_CHANGED_RULES) + 1):
        for names in combinations(OBSERVABLE_RULES[engine], count):
            changes = {name: not getattr(rules, name) for name in names}
            yield changes, with_changes(rules, changes)


def with_changes(rules: Rules, changes: Mapping[str, Any]) -> Rules:
    """Return a copy of ``rules`` with ``changes``."""
    changed: Rules = replace(cast(Any, rules), **changes)
    return changed
