"""What sets the releases of SGLang's scheduler apart, as data.

Read from the wheels on PyPI, ``managers/scheduler.py`` and ``schedule_policy.py``, and recorded
from them as they run (``simkv/conformance/record/sglang_recorder.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from simkv.core.scheduler_protocol import Variant


@dataclass(frozen=True)
class SglangRules:
    """The rules that differ between releases; the defaults are those of 0.5.23.

    ``drops_finished``: who has finished leaves the running batch before the queue is looked at;
    else only when that batch is about to decode, and until then is promised memory and a seat.
    ``spent_budget_stops`` a pass before its first candidate, where the rest of a prompt or the
    decodes of a mixed step have spent it; else one more may be taken. ``counts_held_rows``: the
    row that the rest of a prompt holds already is not counted against the free rows.
    ``foresees_ends``: the overlap loop leaves out whose token under way is its last by length; else
    that computes one more, which is thrown away. ``empty_opens`` the queue when nobody runs;
    ``full_if_served``: a candidate for which memory is promised out closes it only if somebody is
    served; else always. ``mixes_if_it_fits``: decodes join a prefill if they have room; else in
    any case.
    ``promises_fixed`` lengths (``ignore_eos``) in full, not by the ratio; without a prefix cache
    such a candidate has a ``page_to_spare``. ``refreshes`` what the head of the queue finds cached,
    now and then, where passes go in fcfs order.
    ``evicts_shortfall``: cached prefixes go until what is asked for is free; else as many tokens as
    are asked for, whatever is free. ``splits_outputs`` from the prompt in the cache when a
    request has ended, so that they can go first; ``splits_retracted`` also when one that was
    retracted has computed both again.
    ``keeps_preempted``: who was preempted for one that is not taken after all waits again; else
    nobody has it any more, and it never ends.
    ``caps_free_slots`` that a pass waits for at 2 to 4 by the rows that there are, none if they are
    less than 8.
    ``bounds_delays``: the prefill delayer gives up after its passes, looks at the last 16 attempts,
    and is asked when a candidate has passed all tests, for the rest of a prompt too; else it delays
    while rows are few, remembers the largest prefill for good, and is asked first.
    ``lpm_aging`` has ``lpm_aging_tokens_per_pass``. ``policies`` are the orders of the queue that
    can be asked for; ``lacks`` are knobs that cannot be set yet.
    """

    drops_finished: bool = True
    spent_budget_stops: bool = True
    counts_held_rows: bool = True
    foresees_ends: bool = True
    empty_opens: bool = True
    full_if_served: bool = True
    mixes_if_it_fits: bool = True
    promises_fixed: bool = True
    page_to_spare: bool = True
    refreshes: bool = True
    evicts_shortfall: bool = True
    splits_outputs: bool = True
    splits_retracted: bool = True
    keeps_preempted: bool = True
    caps_free_slots: bool = False
    bounds_delays: bool = True
    lpm_aging: bool = False
    policies: tuple[str, ...] = (
        "fcfs",
        "lpm",
        "hrrn",
        "lof",
        "dfs-weight",
        "routing-key",
        "shortest-prefill-first",
    )
    lacks: tuple[str, ...] = ()


LATEST = SglangRules()

RULES: Mapping[str, SglangRules] = {
    "0.5.23": LATEST,
    "0.5.23-lpm-aging": replace(LATEST, lpm_aging=True),
    "0.5.22": replace(
        LATEST,
        drops_finished=False,
        spent_budget_stops=False,
        counts_held_rows=False,
        lacks=("prefill_decode_interval_min_bs",),
    ),
    "0.5.20": replace(
        LATEST,
        drops_finished=False,
        spent_budget_stops=False,
        counts_held_rows=False,
        foresees_ends=False,
        empty_opens=False,
        full_if_served=False,
        mixes_if_it_fits=False,
        promises_fixed=False,
        page_to_spare=False,
        refreshes=False,
        splits_retracted=False,
        keeps_preempted=False,
        policies=("fcfs", "lpm", "hrrn", "lof", "dfs-weight", "routing-key"),
        lacks=("prefill_decode_interval_min_bs",),
    ),
    "0.5.15": replace(
        LATEST,
        drops_finished=False,
        spent_budget_stops=False,
        counts_held_rows=False,
        foresees_ends=False,
        empty_opens=False,
        full_if_served=False,
        mixes_if_it_fits=False,
        promises_fixed=False,
        page_to_spare=False,
        refreshes=False,
        evicts_shortfall=False,
        splits_outputs=False,
        splits_retracted=False,
        keeps_preempted=False,
        caps_free_slots=True,
        bounds_delays=False,
        policies=("fcfs", "lpm", "lof", "dfs-weight", "routing-key"),
        lacks=(
            "prefill_decode_interval_min_bs",
            "prefill_decode_interval",
            "retraction_policy",
        ),
    ),
}

_NEW_IN_23 = ("drops_finished", "spent_budget_stops", "counts_held_rows")

#: The releases, the newest first.
RELEASES = tuple(name for name in RULES if "lpm" not in name)

#: Rules that a recording can show; nothing shows ``empty_opens`` of an engine with one rank.
OBSERVABLE_RULES = (
    "drops_finished",
    "spent_budget_stops",
    "counts_held_rows",
    "foresees_ends",
    "full_if_served",
    "mixes_if_it_fits",
    "promises_fixed",
    "page_to_spare",
    "refreshes",
    "evicts_shortfall",
    "splits_outputs",
    "splits_retracted",
    "keeps_preempted",
    "caps_free_slots",
    "bounds_delays",
)

#: Rules that the recordings of a release show, as flipping each of them shows.
RULES_SHOWN: Mapping[str, tuple[str, ...]] = {
    "0.5.23": OBSERVABLE_RULES,
    "0.5.22": OBSERVABLE_RULES,
    # A standstill, which alone shows who closes the queue, needs a page to spare.
    "0.5.20": tuple(rule for rule in OBSERVABLE_RULES if rule != "full_if_served"),
    "0.5.15": tuple(rule for rule in OBSERVABLE_RULES if rule != "full_if_served"),
}

VARIANTS: Mapping[str, Variant] = {
    "0.5.23": Variant(
        source="PyPI sglang==0.5.23, managers/scheduler.py and schedule_policy.py",
        summary="prefill first, decode memory promised by a decaying ratio, retraction to the tail",
    ),
    "0.5.23-lpm-aging": Variant(
        source="PyPI sglang==0.5.23 with sgl-project/sglang#31723 (2026-07-19, open)",
        summary="0.5.23; under lpm every pass that a request waited counts like cached tokens",
    ),
    "0.5.22": Variant(
        source="PyPI sglang==0.5.22, managers/scheduler.py and schedule_policy.py",
        summary="before 0.5.23: who has finished counts until the next decode, and a pass whose "
        "budget is spent may take one more",
    ),
    "0.5.20": Variant(
        source="PyPI sglang==0.5.20, managers/scheduler.py and schedule_policy.py",
        summary="before 0.5.22: the overlap loop computes a token past the last, mixed decodes are "
        "not tested for room, fixed lengths are promised by the ratio",
    ),
    "0.5.15": Variant(
        source="PyPI sglang==0.5.15, managers/scheduler.py and schedule_policy.py",
        summary="before 0.5.20: eviction takes as much as is asked for whatever is free, cached "
        "outputs are not split from their prompt, no hrrn",
    ),
}
