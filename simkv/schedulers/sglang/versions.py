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
    """Rules that differ between releases; the defaults belong to the oldest release.

    ``lacks`` lists the options that a release does not have.
    """

    drops_finished: bool = _admission(
        "Finished requests leave the running batch before admission.",
        "Finished requests leave when the batch starts to decode. Until then, their memory and "
        "slots count as used.",
        source="managers/scheduler.py",
        since="0.5.23",
    )
    spent_budget_stops: bool = _admission(
        "If a chunked prompt or mixed decodes have used the whole budget, the pass considers "
        "no further request.",
        "One more request may be admitted.",
        source="managers/schedule_policy.py",
        since="0.5.23",
    )
    counts_held_rows: bool = _admission(
        "The slot that a chunked prompt already holds does not reduce the number of free slots.",
        source="managers/scheduler.py",
        since="0.5.23",
    )
    empty_opens: bool = _admission(
        "An empty running batch clears the batch-full flag.",
        source="managers/scheduler.py",
        since="0.5.22",
        hidden="with one rank it has no visible effect",
    )
    full_if_served: bool = _admission(
        "If a waiting request does not fit into the unreserved memory, the batch-full flag is "
        "set only if another request runs or was admitted in this pass.",
        "The flag is always set.",
        source="managers/schedule_policy.py",
        since="0.5.22",
        # Recordings show this rule only through a deadlock.
        needs=("page_to_spare",),
    )
    promises_fixed: bool = _admission(
        "Memory is reserved for all output tokens of a request with ignore_eos.",
        "Memory is reserved for a share of the output tokens, the new-token ratio.",
        source="managers/schedule_policy.py",
        since="0.5.22",
    )
    page_to_spare: bool = _admission(
        "Without a prefix cache, a request with ignore_eos needs one more page to be admitted.",
        source="managers/schedule_policy.py",
        since="0.5.22",
    )
    keeps_preempted: bool = _admission(
        "If a request is preempted for another request that is then not admitted, the "
        "preempted request waits again.",
        "The preempted request is lost and never ends.",
        source="managers/schedule_policy.py",
        since="0.5.22",
    )
    caps_free_slots: bool = _admission(
        "min_free_slots_delay is limited to at most 2 to 4, depending on the number of slots, "
        "and to 0 for fewer than 8 slots.",
        source="managers/scheduler.py",
        until="0.5.20",
    )
    bounds_delays: bool = _admission(
        "The prefill delayer delays for a limited number of passes and uses the sizes of the "
        "last 16 prefills. It is applied after all other checks, and also to chunked prompts.",
        "The prefill delayer delays without limit while few slots are free and uses the "
        "largest prefill so far. It is applied before all other checks.",
        source="managers/prefill_delayer.py",
        since="0.5.20",
    )
    refreshes: bool = _memory(
        "Passes without prefix matching periodically mark the cached prefixes of the first queued "
        "requests as recently used.",
        source="managers/schedule_policy.py",
        since="0.5.22",
    )
    evicts_shortfall: bool = _memory(
        "Eviction frees only the missing tokens.",
        "Eviction frees the requested number of tokens, even if some tokens are free.",
        source="mem_cache",
        since="0.5.20",
    )
    splits_outputs: bool = _memory(
        "When a request ends, its cached outputs are split from its prompt, so that they can be "
        "evicted first.",
        source="mem_cache",
        since="0.5.20",
    )
    splits_retracted: bool = _memory(
        "Outputs are also split from the prompt if a retracted request has recomputed both.",
        source="mem_cache",
        since="0.5.22",
    )
    foresees_ends: bool = _decode(
        "The overlap loop skips requests whose token in flight is the last one that their "
        "length limit allows.",
        "The request computes one more token, which is discarded.",
        source="managers/scheduler.py",
        since="0.5.22",
    )
    mixes_if_it_fits: bool = _decode(
        "Decodes join a prefill only if they fit into memory.",
        "Decodes always join a prefill. If they do not fit, the engine crashes.",
        source="managers/scheduler.py",
        since="0.5.22",
    )
    lpm_aging: bool = _admission(
        "Under lpm, each pass that a request waits counts like lpm_aging_tokens_per_pass cached "
        "tokens.",
        source="sgl-project/sglang#31723 (open)",
        hidden="in no release",
    )
    policies: tuple[str, ...] = _admission(
        "Supported queue orders",
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
    "0.5.23; under lpm, each pass that a request waits counts like a number of cached tokens",
)
VARIANTS: Mapping[str, Variant] = {
    name: _release(name) if name in RELEASES else _PROPOSED for name in RULES
}


def find_variant(name: str) -> str:
    """Return the variant of a release name; ``v0.5.23`` and ``0.5.23.post1`` mean 0.5.23.

    Raises ValueError for an unknown name.
    """
    for known in (name, plain_release(name)):
        if known in RULES:
            return str(known)
    raise ValueError(f"unknown version {name!r}; expected one of {', '.join(RULES)}")
