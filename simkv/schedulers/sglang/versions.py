"""Differences between releases of SGLang's scheduler, as data.

Read from the wheels on PyPI, ``managers/scheduler.py`` and ``schedule_policy.py``, and recorded
while they run (``simkv/conformance/record/sglang_recorder.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from simkv.core.scheduler_protocol import Variant


@dataclass(frozen=True)
class SglangRules:
    """Rules that differ between releases; the defaults are those of 0.5.23.

    - ``drops_finished``: finished requests leave the running batch before admission. Otherwise they
      leave when the batch is about to decode, and count for promised memory and rows until then.
    - ``spent_budget_stops``: a pass ends before its first candidate if a chunked prompt or the
      decodes of a mixed step have used up the budget. Otherwise one more candidate may be admitted.
    - ``counts_held_rows``: the row that a chunked prompt already holds does not count against the
      free rows.
    - ``foresees_ends``: the overlap loop skips requests whose in-flight token is their last by
      length. Otherwise it computes one more token, which is discarded.
    - ``empty_opens``: an empty running batch clears the batch-full flag.
    - ``full_if_served``: a candidate without enough unpromised memory sets the batch-full flag only
      if another request is running or chosen. Otherwise it always does.
    - ``mixes_if_it_fits``: decodes join a prefill only if they fit into memory. Otherwise they
      always join.
    - ``promises_fixed``: a request with ``ignore_eos`` is promised all its tokens, not the ratio.
    - ``page_to_spare``: without a prefix cache such a request needs one more page to be admitted.
    - ``refreshes``: passes without prefix matching periodically refresh the cached prefixes of the
      queue's head.
    - ``evicts_shortfall``: eviction frees only the missing tokens. Otherwise it evicts the
      requested number regardless of free tokens.
    - ``splits_outputs``: when a request ends, its cached outputs are split from its prompt, so that
      they can be evicted first. ``splits_retracted``: also when a retracted request has recomputed
      both.
    - ``keeps_preempted``: a request preempted for a candidate that is not admitted waits again.
      Otherwise it is lost and never ends.
    - ``caps_free_slots``: ``min_free_slots_delay`` is capped at 2 to 4, depending on the number of
      rows, and at 0 below 8 rows.
    - ``bounds_delays``: the prefill delayer stops after its maximum number of passes, remembers the
      last 16 attempts, and is asked after all other tests and for chunked prompts. Otherwise it
      delays as long as rows are few, remembers the largest prefill for good, and is asked first.
    - ``lpm_aging``: ``lpm_aging_tokens_per_pass`` exists.
    - ``policies``: supported queue orders. ``lacks``: options that the release does not have.
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

#: Releases, newest first.
RELEASES = tuple(name for name in RULES if "lpm" not in name)

#: Rules that a recording can show; with one rank ``empty_opens`` has no visible effect.
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

#: Rules that the recordings of a release show, verified by flipping each of them.
RULES_SHOWN: Mapping[str, tuple[str, ...]] = {
    "0.5.23": OBSERVABLE_RULES,
    "0.5.22": OBSERVABLE_RULES,
    # Only a deadlock shows which request sets the batch-full flag, and it needs ``page_to_spare``.
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
