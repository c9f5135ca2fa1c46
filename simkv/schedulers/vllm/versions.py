"""What sets the releases of vLLM's V1 scheduler apart, as data: what each one brought.

Read from the wheels on PyPI, 0.11.0 to 0.33.0: ``vllm/v1/core/sched/scheduler.py`` and
``async_scheduler.py``, ``vllm/v1/core/kv_cache_manager.py``, ``block_pool.py`` and
``single_type_kv_cache_manager.py``, ``vllm/config/scheduler.py`` and ``vllm/engine/arg_utils.py``.
What is not named here is the same in all of them: running requests first and in order, one token
budget for both loops, nobody admitted in a step that preempted, the last one preempted under fcfs
and put back at the very front, at least one token computed again after a hit, of equal blocks the
one registered first is hit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from simkv.core.scheduler import Variant


class Fixed(NamedTuple):
    """The only value of a knob that a release can be given, and why; ``{version}`` is filled in."""

    value: object
    why: str


@dataclass(frozen=True)
class VllmRules:
    """The rules that differ between releases; the defaults are those of 0.33.0.

    Defaults of knobs: ``async_scheduling``, ``enable_prefix_caching`` and
    ``scheduler_reserve_full_isl`` (the whole sequence must fit at admission, #37307; before, its
    first chunk). ``fixed`` are the knobs that a release does not have, or that are not modelled for
    it.

    ``keyless_first``: freed blocks without a key of the prefix cache are taken again before all
    others (#42656); else all queue up behind, the tail of a request before its head.
    ``threshold_spares_lone``: ``long_prefill_token_threshold`` does not cap who is alone.
    ``two_budgets``: ``max_num_batched_tokens`` limits a step beside ``max_num_scheduled_tokens``;
    else that replaces it, also where it is larger.
    ``skip_blocked``: one without blocks does not stop those that wait behind it. ``swaps``: the KV
    of the preempted goes to host memory; see swap.py.

    At start-up: ``spares_null_block`` asks whether a sequence of ``max_model_len`` fits beside the
    null block; else a cache is accepted that such a sequence outgrows by one block.
    ``checks_threshold`` refuses a ``long_prefill_token_threshold`` above ``max_model_len``.

    Under priority: ``goes_on`` with those behind a running request that has preempted itself;
    else they sit the step out (#26765). ``finds_next`` when a victim before the current request
    had not been scheduled; else the one behind the current request is passed over (issue #49097).
    ``drops_victims`` from the step in which they had been scheduled; else they stay in its batch,
    keep their share of the budget, count those tokens as computed though their blocks are gone,
    and let somebody be passed over. ``breaks_ties`` of priority and arrival by the id of the
    request; else the engine dies when it compares two such requests.

    With LoRA: adapters of all running requests count against ``max_loras`` if ``counts_all_loras``;
    else not those of requests that sit the step out. Who is passed over for it keeps its place
    under fcfs; but ``turns_skipped`` puts the last of them first, and ``skipped_apart`` has them in
    a queue of their own, which is looked at before that of the others and of the preempted.

    With windows (windows.py): ``keyless_windows``: whatever ``keyless_first`` says, their freed
    blocks without a key are taken again first. ``frees_processed``: tokens under way count as not
    computed when blocks are given back. ``keeps_boundaries``: the cache keeps of a window only
    where a hit could end.

    With states (states.py, split.py), which by default the prefix cache ``caches_states`` of:
    ``frees_gaps``: all states behind go, else those behind a gap stay to the end.
    ``starts_at_junctions``: a first chunk ends where the hit of another group ended;
    ``keeps_junctions``: any does.
    ``wide_states``: chunks of the last block end at a block, too, and where a block is larger than
    a chunk may be, they end anywhere; else start-up refuses that. ``leaves_last``: of a prompt that
    ends with a block, the state is kept a block before.

    With drafts (drafts.py, lookahead.py): ``draft_methods`` that the release has, of which
    ``async_drafts`` may be scheduled asynchronously. Slots of a draft model come out of the budget
    for ``max_num_seqs`` once (``slots_of_budget``), or for each request in a step
    (``slots_by_request``). A request with one token to compute is let in with as many places as the
    others have (``pads_drafts``), if it is a hit also beside nobody (``pads_hits``); where these
    reach past ``max_model_len`` it goes without them (``pads_with_room``), else it waits. It gets
    lookahead slots at once (``lookahead_at_admission``), or from its second step on.
    ``drafts_for_chunks``: drafts follow on an unfinished prompt, too, and are thrown away.
    ``keeps_drafts`` of the preempted. ``caches_accepted`` tokens at once, also when synchronous.
    ``keys_cover_next``: of EAGLE the key of a block covers the token behind it; else a hit is a
    block shorter than it could be.

    Asynchronous: ``sees_the_end`` of a request whose last token by ``max_tokens`` is under way;
    else it computes one token more, which is thrown away.
    """

    async_scheduling: bool = True
    scheduler_reserve_full_isl: bool = True
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    keyless_first: bool = True
    threshold_spares_lone: bool = True
    two_budgets: bool = True
    spares_null_block: bool = True
    checks_threshold: bool = True
    skip_blocked: bool = False
    swaps: bool = False
    enable_prefix_caching: bool = True
    goes_on: bool = True
    finds_next: bool = True
    drops_victims: bool = True
    breaks_ties: bool = True
    sees_the_end: bool = True
    counts_all_loras: bool = True
    turns_skipped: bool = False
    skipped_apart: bool = False
    keyless_windows: bool = True
    frees_processed: bool = True
    keeps_boundaries: bool = True
    caches_states: bool = True
    frees_gaps: bool = True
    starts_at_junctions: bool = True
    keeps_junctions: bool = True
    wide_states: bool = True
    leaves_last: bool = True
    draft_methods: tuple[str, ...] = ("eagle", "ngram", "draft_model")
    async_drafts: tuple[str, ...] = ("eagle", "ngram", "draft_model")
    slots_of_budget: bool = False
    slots_by_request: bool = True
    pads_drafts: bool = True
    pads_with_room: bool = True
    pads_hits: bool = True
    lookahead_at_admission: bool = True
    drafts_for_chunks: bool = False
    keeps_drafts: bool = False
    caches_accepted: bool = True
    keys_cover_next: bool = True

    def refuse(self, version: str, config: object) -> None:
        """Raise ValueError if ``config`` sets a knob that ``version`` cannot be given."""
        for knob, fixed in self.fixed.items():
            if getattr(config, knob) not in (fixed.value, None):
                raise ValueError(f"{knob}: {fixed.why.format(version=version)}")


@dataclass(frozen=True)
class Release:
    """A minor release: the ``commit`` of its wheel, and what it ``brought``, in words.

    ``rules`` hold from it on. ``knobs`` can be set from it on, with the value that those before it
    have in their place; those ``without`` can only be set before. ``patch`` is the patch release
    that was read and recorded.
    """

    commit: str
    brought: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, object] = field(default_factory=dict)
    without: Mapping[str, Fixed] = field(default_factory=dict)
    patch: int = 0


#: What a release before ``RELEASES`` changed anything goes by.
OLDEST = VllmRules(
    async_scheduling=False,
    scheduler_reserve_full_isl=False,
    keyless_first=False,
    threshold_spares_lone=False,
    two_budgets=False,
    spares_null_block=False,
    checks_threshold=False,
    goes_on=False,
    finds_next=False,
    drops_victims=False,
    breaks_ties=False,
    sees_the_end=False,
    counts_all_loras=False,
    turns_skipped=True,
    keyless_windows=False,
    frees_processed=False,
    keeps_boundaries=False,
    caches_states=False,
    frees_gaps=False,
    starts_at_junctions=False,
    keeps_junctions=False,
    wide_states=False,
    leaves_last=False,
    draft_methods=("eagle", "ngram"),
    async_drafts=("eagle",),
    slots_by_request=False,
    pads_drafts=False,
    pads_with_room=False,
    pads_hits=False,
    lookahead_at_admission=False,
    drafts_for_chunks=True,
    keeps_drafts=True,
    caches_accepted=False,
    keys_cover_next=False,
)

#: By the number after ``0.``, oldest first.
RELEASES: Mapping[int, Release] = {
    9: Release(
        "v0.9.2",
        "the first chunk of a prompt must fit at admission; synchronous; always chunked; fcfs only",
        patch=2,
    ),
    10: Release(
        "26b999c71",
        "asynchronous if asked; priority",
        knobs={"async_scheduling": False, "policy": "fcfs"},
        patch=2,
    ),
    11: Release("f71952c1c"),
    12: Release(
        "4fd9d6a85",
        "asynchronous, nothing is computed past the last token; priority: a victim leaves its "
        "batch, ties are broken; chunks can be off",
        {"sees_the_end": True, "drops_victims": True, "breaks_ties": True},
        {"enable_chunked_prefill": True, "num_speculative_tokens": 0},
    ),
    13: Release("72506c983"),
    14: Release(
        "b17039bcc",
        "asynchronous by default; LoRA: who is passed over for max_loras keeps its place",
        {"async_scheduling": True, "turns_skipped": False, "keeps_drafts": False},
    ),
    15: Release(
        "f17644344",
        "drafts of a model of its own",
        {"draft_methods": ("eagle", "ngram", "draft_model")},
    ),
    16: Release(
        "89a77b108",
        "no drafts for unfinished prompts; draft models asynchronously",
        {"drafts_for_chunks": False, "async_drafts": ("eagle", "draft_model")},
    ),
    17: Release(
        "b31e9326a",
        "slots of a draft model come out of the budget",
        {"slots_of_budget": True},
    ),
    18: Release(
        "bcf2be961",
        "LoRA: who is passed over for max_loras waits ahead of the preempted",
        {"skipped_apart": True},
    ),
    19: Release(
        "2a69949bd",
        "the whole sequence must fit when it is admitted (scheduler_reserve_full_isl)",
        {"scheduler_reserve_full_isl": True},
        {"scheduler_reserve_full_isl": False},
    ),
    20: Release("b8160878f"),
    21: Release(
        "ad7125a43",
        "at admission a window counts at most what it ever has; groups of layers from here on",
        knobs={"kv_cache_groups": (0,), "mamba_cache_mode": None},
    ),
    22: Release("0b3ba88f1"),
    23: Release(
        "0fc695fc6",
        "lookahead slots for drafts from the first step on; blocks of windows that are not cached "
        "are taken again first",
        {"lookahead_at_admission": True, "keyless_windows": True},
    ),
    24: Release(
        "ee0da84ab",
        "of freed blocks those that are not cached are taken again first; watermark; with states a "
        "first chunk ends at a junction",
        {"keyless_first": True, "starts_at_junctions": True},
        {"watermark": 0.0},
    ),
    25: Release(
        "dd10e03f9",
        "who has one token to compute is let in with as many places for drafts as the others",
        {"pads_drafts": True},
    ),
    26: Release(
        "ffd46bfab",
        "max_num_scheduled_tokens, which replaces the budget; blocks behind a window are given "
        "back when no step under way reads them; by default states are cached, at each junction",
        {"frees_processed": True, "caches_states": True, "keeps_junctions": True},
        {"max_num_scheduled_tokens": None},
    ),
    27: Release(
        "4bdc8a788",
        "start-up refuses a threshold above max_model_len, but no block larger than a chunk for "
        "states",
        {"checks_threshold": True, "wide_states": True},
    ),
    28: Release(
        "2cf0a6915",
        "both budgets limit a step; priority: a victim that sat the step out passes nobody over",
        {
            "two_budgets": True,
            "finds_next": True,
            "slots_of_budget": False,
            "slots_by_request": True,
        },
    ),
    29: Release(
        "98dff2a81",
        "start-up asks whether the longest sequence fits beside the null block; queue limits; of "
        "windows the cache keeps only where a hit could end",
        {"spares_null_block": True, "keeps_boundaries": True, "pads_with_room": True},
        {"max_num_queued_reqs": None, "max_num_queued_tokens": None},
    ),
    30: Release(
        "ced6857af",
        "all states behind are given back; places for drafts also for a hit beside nobody",
        {"frees_gaps": True, "pads_hits": True},
    ),
    31: Release(
        "db9527a46",
        "the threshold spares a request that is alone; max_num_active_seqs, an adaptive threshold; "
        "one waiting queue for all",
        {"threshold_spares_lone": True, "skipped_apart": False},
        {"max_num_active_seqs": None, "long_prefill_token_threshold_adaptive": False},
    ),
    32: Release(
        "5df63a720",
        "of a prompt that ends with a block the state before its last block is kept",
        {"leaves_last": True},
        {"mamba_prefill_checkpoints": False},
        without={
            "mamba_cache_mode": Fixed(
                "align", "ended with vLLM 0.31, in {version} it is always align; leave it out"
            )
        },
    ),
    33: Release(
        "4ba787ec9",
        "priority: those behind one that preempts itself go on; adapters of all who run count "
        "against max_loras; prefill_schedule_interval",
        {
            "goes_on": True,
            "counts_all_loras": True,
            "caches_accepted": True,
            "keys_cover_next": True,
            "async_drafts": ("eagle", "ngram", "draft_model"),
        },
        {"prefill_schedule_interval": 1},
    ),
}

#: Patch releases whose scheduler was recorded too.
PATCHES = ("0.27.1",)

#: Why a knob cannot be set before the release that brought it.
CAME = "came with vLLM {since}, {{version}} does not have it; leave it out"
WHY = {
    "enable_chunked_prefill": "vLLM {{version}} always chunks prefills on a GPU; leave it out",
    "async_scheduling": "vLLM {{version}} schedules a step when the one before it is done; leave "
    "it out",
    "policy": "under priority vLLM {{version}} dies of an assertion when it preempts a request "
    "that it has scheduled in the same step, which is not modelled; only fcfs",
    "kv_cache_groups": "groups of layers are modelled from vLLM {since} on, not for {{version}}; "
    "leave it out",
    "mamba_cache_mode": "groups of layers are modelled from vLLM {since} on, not for {{version}}; "
    "leave it out",
    "num_speculative_tokens": "speculative decoding is modelled from vLLM {since} on, not for "
    "{{version}}; leave it out",
    "prefill_schedule_interval": "one engine goes by it since vLLM {since}; in {{version}} it is "
    "unknown or for data-parallel ranks only; leave it out",
}
_NO_GROUPS = Fixed(
    (0,), "{version} is modelled for one group of layers that attend to everything; leave it out"
)
_NO_DRAFTS = Fixed(0, "{version} is not modelled with speculative decoding; leave it out")
_NO_SWAP = {"num_cpu_blocks": Fixed(0, "vLLM {version} does not swap; leave it out")}


def _minor(name: str) -> int:
    return int(name.split(".")[1])


def _rules(minor: int) -> VllmRules:
    """All that the releases up to this one brought."""
    rules, fixed = OLDEST, dict(_NO_SWAP)
    for number, release in RELEASES.items():
        if number <= minor:
            rules = replace(rules, **release.rules)
            fixed.update(release.without)
        else:
            for knob, value in release.knobs.items():
                fixed[knob] = Fixed(value, WHY.get(knob, CAME).format(since=f"0.{number}"))
    return replace(rules, fixed=fixed)


#: The variant of each minor release, newest first.
MINORS = {
    f"0.{minor}": f"0.{minor}.{RELEASES[minor].patch}" for minor in sorted(RELEASES, reverse=True)
}
_NEWEST = max(RELEASES)
_LATEST = _rules(_NEWEST)

#: The rules of each variant: of releases, and of changes that nobody has released.
RULES: Mapping[str, VllmRules] = {
    "0.33.0": _LATEST,
    "0.33.0-skip-blocked": replace(
        _LATEST,
        skip_blocked=True,
        fixed={
            **_LATEST.fixed,
            "kv_cache_groups": _NO_GROUPS,
            "num_speculative_tokens": _NO_DRAFTS,
        },
    ),
    "0.33.0-swap": replace(
        _LATEST,
        swaps=True,
        enable_prefix_caching=False,
        fixed={
            "enable_prefix_caching": Fixed(
                value=False, why="{version} has no prefix cache; leave it out"
            ),
            "kv_cache_groups": _NO_GROUPS,
            "num_speculative_tokens": _NO_DRAFTS,
        },
    ),
    **{name: _rules(_minor(name)) for name in MINORS.values() if _minor(name) < _NEWEST},
}


def _release(name: str) -> Variant:
    minor = _minor(name)
    brought = max(number for number in RELEASES if number <= minor and RELEASES[number].brought)
    return Variant(
        f"vllm-project/vllm@{RELEASES[minor].commit} ({name}, wheel), vllm/v1/core",
        f"since 0.{brought}: {RELEASES[brought].brought}",
    )


VARIANTS: Mapping[str, Variant] = {
    "0.33.0": Variant(
        "vllm-project/vllm@4ba787ec9 (0.33.0), vllm/v1/core/sched",
        "chunked prefill, decodes first; the whole sequence must fit when it is admitted",
    ),
    "0.33.0-skip-blocked": Variant(
        "0.33.0 with vllm-project/vllm#33499 (2026-02-01, open; also in #35852 and #36390)",
        "0.33.0; a waiting request for which there are no blocks does not stop those behind it",
    ),
    "0.33.0-swap": Variant(
        "0.33.0 with the swapping of vLLM V0 (up to 0.9, vllm/core/scheduler.py); ours, not vLLM's",
        "0.33.0; the KV of the preempted goes to host memory and comes back, as far as it has room",
    ),
    **{name: _release(name) for name in MINORS.values() if _minor(name) < _NEWEST},
}


def variant_of(name: str) -> str:
    """The variant that goes by ``name``: 0.27, 0.27.0 and any patch release of it are one.

    Raises ValueError if there is none.
    """
    if name in RULES:
        return name
    parts = name.split(".")
    if len(parts) in (2, 3) and parts[-1].isascii() and parts[-1].isdecimal():
        minor = ".".join(parts[:2])
        if minor in MINORS:
            return MINORS[minor]
    others = ", ".join(name for name in RULES if "-" in name)
    raise ValueError(
        f"{name!r} is not known; expected a release of vLLM from 0.{min(RELEASES)} to "
        f"0.{_NEWEST} (such as 0.27, 0.27.0 or 0.27.1), or {others}"
    )


def rules_of(name: str) -> VllmRules:
    """The rules of the variant that goes by ``name``."""
    return RULES[variant_of(name)]


class ReleaseNames:
    """What a ``variant`` may be called: for pydantic, which asks, and for editors."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        def known(name: str) -> str:
            variant_of(name)
            return name

        check = {"type": "no-info", "function": known}
        return {"type": "function-after", "function": check, "schema": handler(source)}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> Any:
        minors = "|".join(str(minor) for minor in RELEASES)
        names = [*RULES, *(name.rpartition(".")[0] for name in RULES if "-" not in name)]
        patch = {"pattern": rf"^0\.({minors})\.[0-9]+$"}
        return {**handler(schema), "anyOf": [{"enum": names}, patch]}


def like(name: str) -> str:
    """The release that brought the rules of this one; a variant that is none is like no other."""
    rules = rules_of(name)
    return [variant for variant, others in RULES.items() if others == rules][-1]


def assumed(name: str) -> str | None:
    """What has to be taken on trust of a patch release that nobody recorded; None if nothing."""
    variant = variant_of(name)
    if name.count(".") < 2 or name in (variant, *PATCHES):
        return None
    return f"vLLM {name} was not recorded: it goes by the rules of {variant}"
