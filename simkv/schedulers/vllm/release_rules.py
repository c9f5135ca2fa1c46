"""Rules that differ between the releases of vLLM's V1 scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class FixedKnob(NamedTuple):
    """The only value of a knob that a release accepts, and the reason; ``{version}`` is filled
    in."""

    value: object
    why: str


@dataclass(frozen=True)
class VllmRules:
    """Rules that differ between releases; the defaults belong to the first, 0.9.

    Defaults of knobs: ``async_scheduling``, ``enable_prefix_caching`` and
    ``scheduler_reserve_full_isl`` (the whole sequence must fit at admission, #37307; before, only
    its first chunk). ``fixed`` lists the knobs that a release does not have, or that are not
    modelled for it.

    Steps:

    - ``keyless_first``: freed blocks without a prefix-cache key are reused before all others
      (#42656); else all freed blocks queue at the end, the tail of a request before its head.
    - ``threshold_spares_lone``: ``long_prefill_token_threshold`` does not apply to the only
      request.
    - ``two_budgets``: ``max_num_batched_tokens`` limits a step in addition to
      ``max_num_scheduled_tokens``; else the latter replaces it, even if larger.
    - ``skip_blocked``: a waiting request without blocks does not block later ones.

    Start-up:

    - ``spares_null_block``: a sequence of ``max_model_len`` must fit beside the null block; else a
      cache that is one block too small is accepted.
    - ``checks_threshold``: a ``long_prefill_token_threshold`` above ``max_model_len`` is rejected.

    Priority:

    - ``goes_on``: after a running request preempts itself, the step continues with the next one;
      else the later running requests are skipped in this step (#26765).
    - ``finds_next``: preempting an earlier request that was not scheduled does not skip a request;
      else the one after the current request is skipped (issue #49097).
    - ``drops_victims``: a victim is removed from the step in which it was scheduled. Else it stays
      in the batch, keeps its share of the budget, counts its tokens as computed although its blocks
      are freed, and causes another request to be skipped.
    - ``counts_victims``: the engine then fails an assertion if it scheduled more requests than are
      still running.
    - ``breaks_ties``: requests of equal priority and arrival are ordered by id; else the engine
      crashes when it compares them.

    LoRA:

    - ``counts_all_loras``: the adapters of all running requests count against ``max_loras``; else
      not those of requests skipped in this step.
    - A request skipped for ``max_loras`` keeps its position under fcfs. With ``turns_skipped`` the
      skipped requests return in reverse order. With ``skipped_apart`` they wait in a separate
      queue, which is tried before all other and preempted requests.

    Windows (``window_memory.py``):

    - ``keyless_windows``: freed blocks of windows without a key are reused first, regardless of
      ``keyless_first``.
    - ``frees_processed``: tokens in flight count as not computed when blocks are freed.
    - ``keeps_boundaries``: the cache stores blocks of a window only where a hit could end.
    - ``keeps_aligned``: with several block sizes, the cache stores only blocks for hits that end at
      a common multiple; else all blocks.

    States (``state_memory.py``, ``state_chunking.py``):

    - ``caches_states``: the prefix cache is on by default for models with states.
    - ``frees_gaps``: all older states are freed; else states behind a gap stay until the end.
    - ``starts_at_junctions``: a first chunk ends where the hit of another group ended.
    - ``keeps_junctions``: any chunk ends there.
    - ``wide_states``: chunks of the last block also end at a block end, and chunks end anywhere if
      a block is larger than the chunk limit; else start-up rejects such a block size.
    - ``leaves_last``: for a prompt that ends with a block, the state one block earlier is stored.
    - ``marks_again``: the state at the end of a prompt is re-marked as new in every step of a
      request that has it, which delays requests that could reuse it.

    Drafts (``speculative_decoding.py``, ``draft_memory.py``):

    - ``draft_methods``: the methods of the release; ``async_drafts``: those allowed with
      asynchronous scheduling.
    - ``slots_of_budget``: slots of a draft model reduce the budget once, for ``max_num_seqs``
      requests. ``slots_by_request``: they reduce it for each request in a step.
    - ``pads_drafts``: a request with one token to compute is admitted with as many draft slots as
      running requests have; ``pads_hits``: if it is a hit, also when no running request got tokens.
    - ``pads_with_room``: it is admitted without these slots if they exceed ``max_model_len`` or if
      the end of a block cuts them. Else it waits in the first case; in the second the slots count
      although they are not computed.
    - ``lookahead_at_admission``: a request gets lookahead slots at once; else from its second step
      on.
    - ``drafts_for_chunks``: unfinished prompts also get drafts, which are discarded.
    - ``keeps_drafts``: preempted requests keep their drafts.
    - ``caches_accepted``: accepted tokens are cached at once, also with synchronous scheduling.
    - ``keys_cover_next``: with EAGLE, the key of a block covers the next token; else a hit is one
      block shorter than the cached prefix.
    - ``keeps_replays``: for window groups, the cache then stores the blocks that such hits of the
      same prompt and of a longer one need; else those of the same prompt without the shortening.
    - ``peeks_at_last``: the last block is looked up as well.
    - ``drafts_in_states``: drafts are modelled for models with states.

    Host memory (``offloading_connector.py``, ``host_eviction.py``):

    - ``holds_apart``: requests that wait for their KV are in a separate queue, which is tried
      first.
    - ``spares_computing``: with asynchronous scheduling, requests with a step in flight cannot be
      preempted.
    - ``offers_again``: after a preemption all blocks of a prompt are offered again; else only those
      not yet offered. Without ``keeps_stored`` a release forgets that position; it offers the
      blocks that follow the first chunk.
    - ``stores_at_end``: blocks of a prompt that are not stored yet are offered when its request
      ends; ``keeps_ended``: also if its last copy completes earlier.
    - ``counts_left``: after a client disconnect at most the computed tokens are offered; else the
      whole prompt, and the engine crashes if the request has no blocks.
    - ``uses_at_end``: uses by a request count once, when it ends; else all its blocks are touched
      at each lookup and each store.
    - ``ranks_requests``: under LRU, blocks of a request have the rank of its first use while it is
      in the engine; else the rank of their write.
    - ``evicts_either``: under ARC, blocks used once are evicted if there are no others.

    KV from other replicas (``transfer_scheduler.py``), which also uses ``holds_apart`` and
    ``spares_computing``:

    - ``reserves_loads``: a load starts only if it leaves enough blocks for the unfinished prompts.
    - ``caches_loaded``: the block that the last prompt token fills is cached as well.
    - ``keeps_for_loads``: after a client disconnect, blocks of a load are freed when it completes;
      else at once.
    - ``frees_when_done``: if KV can be loaded, blocks that a step in flight writes to are freed
      when it ends.
    - ``drops_under_way``: if KV can be sent, tokens in flight of a victim are discarded.

    Asynchronous scheduling:

    - ``sees_the_end``: a request whose last token by ``max_tokens`` is in flight is skipped; else
      it computes one more token, which is discarded.
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
    # KV from other replicas
    reserves_loads: bool = False
    caches_loaded: bool = False
    keeps_for_loads: bool = False
    frees_when_done: bool = False
    drops_under_way: bool = False
    # Asynchronous
    sees_the_end: bool = False

    def refuse(self, version: str, config: object) -> None:
        """Raise ValueError if ``config`` sets a knob to a value that ``version`` does not
        accept."""
        for knob, fixed in self.fixed.items():
            if getattr(config, knob) not in (fixed.value, None):
                raise ValueError(f"{knob}: {fixed.why.format(version=version)}")
