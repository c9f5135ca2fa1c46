"""The rules that set the releases of vLLM's V1 scheduler apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class FixedKnob(NamedTuple):
    """The only value of a knob that a release can be given, and why; ``{version}`` is filled in."""

    value: object
    why: str


@dataclass(frozen=True)
class VllmRules:
    """The rules that differ between releases; the defaults are those of the first, 0.9.

    Defaults of knobs: ``async_scheduling``, ``enable_prefix_caching`` and
    ``scheduler_reserve_full_isl`` (the whole sequence must fit at admission, #37307; before, its
    first chunk). ``fixed`` are the knobs that a release does not have, or that are not modelled for
    it.

    ``keyless_first``: freed blocks without a key of the prefix cache are taken again before all
    others (#42656); else all queue up behind, the tail of a request before its head.
    ``threshold_spares_lone``: ``long_prefill_token_threshold`` does not cap who is alone.
    ``two_budgets``: ``max_num_batched_tokens`` limits a step beside ``max_num_scheduled_tokens``;
    else that replaces it, also where it is larger.
    ``skip_blocked``: one without blocks does not stop those that wait behind it.

    At start-up: ``spares_null_block`` asks whether a sequence of ``max_model_len`` fits beside the
    null block; else a cache is accepted that such a sequence outgrows by one block.
    ``checks_threshold`` refuses a ``long_prefill_token_threshold`` above ``max_model_len``.

    Under priority: ``goes_on`` with those behind a running request that has preempted itself;
    else they sit the step out (#26765). ``finds_next`` when a victim before the current request
    had not been scheduled; else the one behind the current request is passed over (issue #49097).
    ``drops_victims`` from the step in which they had been scheduled; else they stay in its batch,
    keep their share of the budget, count those tokens as computed though their blocks are gone,
    and let somebody be passed over. With ``counts_victims`` the engine then dies of an assertion if
    it has scheduled more requests than still run. ``breaks_ties`` of priority and arrival by the id
    of the request; else the engine dies when it compares two such requests.

    With LoRA: adapters of all running requests count against ``max_loras`` if ``counts_all_loras``;
    else not those of requests that sit the step out. Who is passed over for it keeps its place
    under fcfs; but ``turns_skipped`` puts the last of them first, and ``skipped_apart`` has them in
    a queue of their own, which is looked at before that of the others and of the preempted.

    With windows (windows.py): ``keyless_windows``: whatever ``keyless_first`` says, their freed
    blocks without a key are taken again first. ``frees_processed``: tokens under way count as not
    computed when blocks are given back. ``keeps_boundaries``: the cache keeps of a window only
    where a hit could end. Where blocks are of several sizes, it keeps (``keeps_aligned``) only what
    a hit needs that ends at a multiple of all; else all blocks.

    With states (states.py, split.py), which by default the prefix cache ``caches_states`` of:
    ``frees_gaps``: all states behind go, else those behind a gap stay to the end.
    ``starts_at_junctions``: a first chunk ends where the hit of another group ended;
    ``keeps_junctions``: any does.
    ``wide_states``: chunks of the last block end at a block, too, and where a block is larger than
    a chunk may be, they end anywhere; else start-up refuses that. ``leaves_last``: of a prompt that
    ends with a block, the state is kept a block before. ``marks_again``: the state at the end of a
    prompt counts as of this step in each step of a request that has it, so that others wait for it.

    With drafts (drafts.py, lookahead.py): ``draft_methods`` that the release has, of which
    ``async_drafts`` may be scheduled asynchronously. Slots of a draft model come out of the budget
    for ``max_num_seqs`` once (``slots_of_budget``), or for each request in a step
    (``slots_by_request``). A request with one token to compute is let in with as many places as the
    others have (``pads_drafts``), if it is a hit also beside nobody (``pads_hits``); where these
    reach past ``max_model_len`` or the end of a block cuts them, it is admitted without them
    (``pads_with_room``); else it waits for the former, and the latter count though they are not
    computed. It gets
    lookahead slots at once (``lookahead_at_admission``), or from its second step on.
    ``drafts_for_chunks``: drafts follow on an unfinished prompt, too, and are thrown away.
    ``keeps_drafts`` of the preempted. ``caches_accepted`` tokens at once, also when synchronous.
    ``keys_cover_next``: of EAGLE the key of a block covers the token behind it; else a hit is a
    block shorter than it could be. Of groups with windows the cache then keeps what such hits need
    of the prompt again and of a longer one (``keeps_replays``), else of the former without the
    block less; the last block is looked up, too (``peeks_at_last``). ``drafts_in_states``: they
    are modelled where some layers keep states.

    With host memory (connector.py, eviction.py): ``holds_apart``: those who wait for their KV are
    in a queue of their own, which is looked at first. ``spares_computing``: asynchronous, whoever
    has a step under way cannot be preempted. ``offers_again``: after a preemption all blocks of a
    prompt are offered anew; else only what was not yet, or where a release forgets how far that was
    (not ``keeps_stored``), what follows on its first chunk. ``stores_at_end``: what is not stored
    yet of a prompt is offered when its request is over; ``keeps_ended``: also when its last copy is
    done before that; ``counts_left``: of one whose client has left no more than is computed, else
    all, and where it has no blocks the engine dies. ``uses_at_end``: uses by a request count once,
    when it is over; else all its blocks are touched whenever it asks, and when it stores.
    ``ranks_requests``: under LRU the blocks of a request have the rank of its first use while it is
    there; else that of their being written. ``evicts_either``: under ARC blocks used once make room
    where there are no others.

    With KV of other replicas (transfer.py), for which the first two hold, too: ``reserves_loads``:
    a load begins only if it leaves the blocks that prompts in the making need. ``caches_loaded``:
    the block that the last token of a prompt fills is cached with the others. ``keeps_for_loads``:
    what a load fills whose client has left is free when it is done, else at once.
    ``frees_when_done``: blocks that a step under way writes to are not free before its end where KV
    may be loaded into them. ``drops_under_way``: where KV may be sent, tokens under way of a victim
    are thrown away.

    Asynchronous: ``sees_the_end`` of a request whose last token by ``max_tokens`` is under way;
    else it computes one token more, which is thrown away.
    """

    # Defaults of knobs
    async_scheduling: bool = False
    enable_prefix_caching: bool = True
    scheduler_reserve_full_isl: bool = False
    fixed: Mapping[str, FixedKnob] = field(default_factory=dict)
    # Steps
    keyless_first: bool = False
    threshold_spares_lone: bool = False
    two_budgets: bool = False
    skip_blocked: bool = False
    # Start-up
    spares_null_block: bool = False
    checks_threshold: bool = False
    # Priority
    goes_on: bool = False
    finds_next: bool = False
    drops_victims: bool = False
    counts_victims: bool = False
    breaks_ties: bool = False
    # LoRA
    counts_all_loras: bool = False
    turns_skipped: bool = True
    skipped_apart: bool = False
    # Windows
    keyless_windows: bool = False
    frees_processed: bool = False
    keeps_boundaries: bool = False
    keeps_aligned: bool = False
    # States
    caches_states: bool = False
    frees_gaps: bool = False
    starts_at_junctions: bool = False
    keeps_junctions: bool = False
    wide_states: bool = False
    leaves_last: bool = False
    marks_again: bool = False
    # Drafts
    draft_methods: tuple[str, ...] = ("eagle", "ngram")
    async_drafts: tuple[str, ...] = ("eagle",)
    slots_of_budget: bool = False
    slots_by_request: bool = False
    pads_drafts: bool = False
    pads_with_room: bool = False
    pads_hits: bool = False
    lookahead_at_admission: bool = False
    drafts_for_chunks: bool = True
    keeps_drafts: bool = True
    caches_accepted: bool = False
    keeps_replays: bool = False
    peeks_at_last: bool = False
    keys_cover_next: bool = False
    drafts_in_states: bool = False
    # Host memory
    holds_apart: bool = False
    spares_computing: bool = False
    stores_at_end: bool = False
    keeps_stored: bool = False
    keeps_ended: bool = False
    counts_left: bool = False
    offers_again: bool = False
    uses_at_end: bool = False
    ranks_requests: bool = False
    evicts_either: bool = False
    # KV from another replica
    reserves_loads: bool = False
    caches_loaded: bool = False
    keeps_for_loads: bool = False
    frees_when_done: bool = False
    drops_under_way: bool = False
    # Asynchronous
    sees_the_end: bool = False

    def refuse(self, version: str, config: object) -> None:
        """Raise ValueError if ``config`` sets a knob that ``version`` cannot be given."""
        for knob, fixed in self.fixed.items():
            if getattr(config, knob) not in (fixed.value, None):
                raise ValueError(f"{knob}: {fixed.why.format(version=version)}")
