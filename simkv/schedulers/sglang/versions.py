"""Releases of SGLang, and the rules of its scheduler that differ between them.

The sources given for each rule are files and names in the wheels on PyPI; a name without a file is
in ``managers/scheduler.py`` or ``managers/schedule_policy.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from simkv.core.engine_version import is_since, plain_release
from simkv.core.scheduler_protocol import Variant
from simkv.schedulers.rule_fields import describe_changes, described_rules, rule, rules_in

#: Modelled releases, newest first.
RELEASES = ("0.5.23", "0.5.22", "0.5.20", "0.5.15")
NEWEST = RELEASES[0]

_admission = partial(rule, "Admission")
_memory = partial(rule, "Memory and cache")
_decode = partial(rule, "Decode steps")


@dataclass(frozen=True)
class SglangRules:
    """Rules that differ between releases. The defaults are the rules of the oldest release.

    ``lacks`` lists the options that a release does not have.
    """

    drops_finished: bool = _admission(
        "Finished requests leave the running batch before admission.",
        "Finished requests leave the running batch when it starts to decode. Until then, their "
        "memory and slots count as used.",
        source="managers/scheduler.py",
        since="0.5.23",
    )
    spent_budget_stops: bool = _admission(
        "If a chunked prompt or decodes in the same step have used the whole token budget, the "
        "pass considers no further request.",
        "The pass may admit one more request in this case.",
        source="managers/schedule_policy.py",
        since="0.5.23",
    )
    counts_held_rows: bool = _admission(
        "When a chunked prompt continues, its slot counts once in the check for free slots.",
        "Its slot counts twice: for an admitted request and for a new request of the pass.",
        source="managers/scheduler.py",
        since="0.5.23",
    )
    empty_opens: bool = _admission(
        "If no request is running, the batch-full flag is cleared.",
        source="managers/scheduler.py",
        since="0.5.22",
        hidden="with one rank, the rule has no visible effect",
    )
    full_if_served: bool = _admission(
        "If a waiting request does not fit into the unreserved memory, the batch-full flag is "
        "set only if another request is running or was admitted in this pass.",
        "The batch-full flag is set in any case.",
        source="managers/schedule_policy.py",
        since="0.5.22",
        # Recordings show this rule only through a deadlock.
        needs=("page_to_spare",),
    )
    promises_fixed: bool = _admission(
        "For a request with `ignore_eos`, memory is reserved for all its remaining output tokens.",
        "Memory is reserved for a fraction of them (the new-token ratio), as for other requests.",
        source="managers/schedule_policy.py",
        since="0.5.22",
    )
    page_to_spare: bool = _admission(
        "Without a prefix cache, a request with `ignore_eos` is admitted only if one more page "
        "is free than the request needs.",
        source="managers/schedule_policy.py",
        since="0.5.22",
    )
    keeps_preempted: bool = _admission(
        "If a request is preempted for another request that is then not admitted, the preempted "
        "request waits again.",
        "The preempted request is lost: it never finishes.",
        source="managers/schedule_policy.py",
        since="0.5.22",
    )
    caps_free_slots: bool = _admission(
        "`min_free_slots_delay` has an upper limit of 2, 3 or 4, which increases with the "
        "number of slots. With fewer than 8 slots, the setting has no effect.",
        source="managers/scheduler.py",
        until="0.5.20",
    )
    bounds_delays: bool = _admission(
        "If fewer slots are free than the largest of the last 16 prefills used, the prefill "
        "delayer postpones prefills for a limited number of passes. It decides after all other "
        "checks. A chunked prompt that continues also triggers its decision, but is not postponed.",
        "The prefill delayer postpones prefills for any number of passes, considers the largest "
        "prefill so far, and decides before all other checks.",
        source="managers/prefill_delayer.py",
        since="0.5.20",
    )
    refreshes: bool = _memory(
        "Some passes do not look up queued prompts in the prefix cache. At regular intervals, "
        "such a pass marks the cached prefixes of the first queued requests as recently used.",
        source="managers/schedule_policy.py",
        since="0.5.22",
    )
    evicts_shortfall: bool = _memory(
        "If too few tokens are free, eviction frees only the missing tokens.",
        "Eviction frees the requested number of tokens, even if some tokens are free already.",
        source="mem_cache",
        since="0.5.20",
    )
    splits_outputs: bool = _memory(
        "When a request ends, its cached outputs become a separate node of the prefix tree, so "
        "that they can be evicted before its prompt.",
        source="mem_cache",
        since="0.5.20",
    )
    splits_retracted: bool = _memory(
        "The outputs of a retracted request also become a separate node when the request has "
        "recomputed its prompt and its outputs.",
        source="mem_cache",
        since="0.5.22",
    )
    foresees_ends: bool = _decode(
        "The overlap loop does not schedule a request again if its token in flight is the last "
        "token that its output limit allows.",
        "The request computes one more token, which is discarded.",
        source="managers/scheduler.py",
        since="0.5.22",
    )
    mixes_if_it_fits: bool = _decode(
        "Running requests decode in the same step as a prefill only if their new tokens fit "
        "into memory.",
        "Running requests always decode in the same step as a prefill. If their tokens do not "
        "fit, the engine crashes.",
        source="managers/scheduler.py",
        since="0.5.22",
    )
    lpm_aging: bool = _admission(
        "With the queue order `lpm`, a request is sorted as if it had `lpm_aging_tokens_per_pass` "
        "more cached tokens for each pass that it has waited.",
        source="sgl-project/sglang#31723 (open)",
        hidden="no release has the rule",
    )
    policies: tuple[str, ...] = _admission(
        "Values of `schedule_policy` that the release supports",
        source="managers/schedule_policy.py",
        values={
            "0.5.15": ("fcfs", "lpm", "lof", "dfs-weight", "routing-key"),
            "0.5.20": ("fcfs", "lpm", "hrrn", "lof", "dfs-weight", "routing-key"),
            "0.5.22": (
                "fcfs",
                "lpm",
                "hrrn",
                "lof",
                "dfs-weight",
                "routing-key",
                "shortest-prefill-first",
            ),
        },
        at_start=True,
    )
    lacks: tuple[str, ...] = ()


#: Options by the release that introduced them, newest release first.
RELEASED_KNOBS: Mapping[str, str] = {
    "prefill_decode_interval_min_bs": "0.5.23",
    "prefill_decode_interval": "0.5.20",
    "retraction_policy": "0.5.20",
}


def _rules(release: str) -> SglangRules:
    lacks = tuple(knob for knob, since in RELEASED_KNOBS.items() if not is_since(release, since))
    return replace(rules_in(SglangRules, release), lacks=lacks)


#: Rules of each variant; a variant is a release or an unreleased change.
RULES: Mapping[str, SglangRules] = {
    NEWEST: _rules(NEWEST),
    "0.5.23-lpm-aging": replace(_rules("0.5.23"), lpm_aging=True),
    **{name: _rules(name) for name in RELEASES[1:]},
}

#: Rules that a recording can show.
OBSERVABLE_RULES = tuple(
    name for name, described in described_rules(SglangRules).items() if described.can_be_shown
)

#: Rules that the recordings of a release show; each was verified by flipping it.
RULES_SHOWN: Mapping[str, tuple[str, ...]] = {
    release: tuple(
        name
        for name in OBSERVABLE_RULES
        if all(getattr(RULES[release], other) for other in described_rules(SglangRules)[name].needs)
    )
    for release in RELEASES
}


def _release(name: str) -> Variant:
    """Describe a release by its source and its rule changes."""
    older = RELEASES[RELEASES.index(name) + 1 :]
    changes = describe_changes(RULES[name], RULES[older[0]]) if older else ""
    source = f"PyPI sglang=={name}, managers/scheduler.py and schedule_policy.py"
    return Variant(source, changes or "the oldest modelled release")


_PROPOSED = Variant(
    "PyPI sglang==0.5.23 with sgl-project/sglang#31723 (2026-07-19, open)",
    "like 0.5.23, but under lpm, a request gains priority with each pass that it waits",
)
VARIANTS: Mapping[str, Variant] = {
    name: _release(name) if name in RELEASES else _PROPOSED for name in RULES
}


def find_variant(name: str) -> str:
    """Return the variant of a release name. Raises ValueError for an unknown name.

    ``v0.5.23`` and ``0.5.23.post1`` mean 0.5.23.
    """
    for known in (name, plain_release(name)):
        if known in RULES:
            return str(known)
    raise ValueError(f"unknown version {name!r}; expected one of {', '.join(RULES)}")
