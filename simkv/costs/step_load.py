# mypyc: compile
"""Work of a step, and the protocol of an executor that returns a step's duration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from simkv.core.scheduler_protocol import Batch, DraftedTokens

Floats = npt.NDArray[np.float64]


class StepLoad(NamedTuple):
    """Work of a step. All token counts are totals over the sequences.

    ``prefill_context`` is the number of tokens before the prefills; their KV was computed earlier.
    ``decode_context`` is the number of KV tokens that decodes read. ``prefill_pairs`` is the number
    of attention pairs (prefill token, attended token). ``emits`` is the number of sampled tokens.
    ``shortest`` and ``longest`` are the smallest and largest KV length of a decode, or 0 if not
    needed.

    ``group_ranks`` is the number of data-parallel ranks in lockstep, or 0 for a single engine.
    ``group_tokens`` is the number of tokens of all ranks, and ``group_most`` is the largest number
    of tokens of a rank. ``lora_copies`` is the number of adapters copied to the GPU before the
    step. ``lora_reads`` is the number of adapters read from disk. ``draft_tokens`` are verified by
    decodes. ``draft_passes`` is the number of drafter passes after the step.
    """

    prefill_seqs: int
    prefill_tokens: int
    prefill_context: int
    decode_seqs: int
    decode_context: int
    prefill_pairs: int = 0
    emits: int = 0
    shortest: int = 0
    longest: int = 0
    group_tokens: int = 0
    group_most: int = 0
    group_ranks: int = 0
    lora_copies: int = 0
    lora_reads: int = 0
    draft_tokens: int = 0
    draft_passes: int = 0


def count_attention_pairs(tokens: int, context: int) -> int:
    """Return the number of attention pairs of ``tokens`` prefill tokens after ``context`` tokens.

    Each token attends to the context, to earlier tokens of the prefill, and to itself.
    """
    return tokens * context + tokens * (tokens + 1) // 2


def compute_step_load(batch: Batch, *, spread: bool = False) -> StepLoad:
    """Return the work of a batch.

    With ``spread``, the shortest and longest decode context are also computed.
    """
    load = _computed(batch)
    if batch.drafted:
        load = _with_drafts(load, batch, batch.drafted)
    if batch.lora_loads != (0, 0):
        load = load._replace(lora_copies=batch.lora_loads[0], lora_reads=batch.lora_loads[1])
    if not spread or not load.decode_seqs:
        return load
    always = batch.kind == "decode"
    contexts = [
        r.context
        for r in batch.rows()
        if always or (_own(batch, r.id, r.tokens) == 1 and r.context)
    ]
    return load._replace(shortest=min(contexts), longest=max(contexts))


def _computed(batch: Batch) -> StepLoad:
    decode_seqs, decode_context = batch.decodes, batch.decode_context
    emits = len(batch.emits) + decode_seqs
    if batch.kind == "decode":
        decode_seqs += len(batch.scheduled)
        return StepLoad(0, 0, 0, decode_seqs, decode_context + sum(batch.context), 0, emits)
    prefill_seqs = prefill_tokens = prefill_context = prefill_pairs = 0
    for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True):
        if context and batch.kind == "mixed" and _own(batch, i, tokens) == 1:
            decode_seqs += 1
            decode_context += context
        else:
            prefill_seqs += 1
            prefill_tokens += tokens
            prefill_context += context
            prefill_pairs += count_attention_pairs(tokens, context)
    prefill = (prefill_seqs, prefill_tokens, prefill_context)
    return StepLoad(*prefill, decode_seqs, decode_context, prefill_pairs, emits)


def _own(batch: Batch, i: int, tokens: int) -> int:
    """Return the number of ``tokens`` of request ``i`` that are not draft tokens."""
    return tokens - batch.drafted.tokens.get(i, 0) if batch.drafted else tokens


def _with_drafts(load: StepLoad, batch: Batch, drafted: DraftedTokens) -> StepLoad:
    """Return ``load`` with the draft tokens that decodes verify."""
    prefill = {
        i
        for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True)
        if batch.kind == "prefill" or not context or _own(batch, i, tokens) > 1
    }
    tokens = sum(n for i, n in drafted.tokens.items() if i not in prefill)
    return load._replace(draft_tokens=tokens, draft_passes=drafted.passes if load.emits else 0)


class Executor(Protocol):
    """Protocol of an object that runs a step, simulated or real, and returns its duration."""

    def run(self, load: StepLoad) -> float:
        """Run a step and return its duration in seconds."""

    def forecast_steps(self, load: StepLoad, steps: int) -> Sequence[float] | Floats:
        """Return the durations in seconds of up to ``steps`` decode steps after a decode-only step.

        The result is empty if the durations are unknown. Only steps that the engine reports to
        ``ran`` count as run.
        """

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        """Record that forecast steps have run. ``load`` is the step before them, and ``seconds``
        contains their durations.
        """

    def idle(self) -> float:
        """Return the duration in seconds of a scheduler pass in which no request can run."""


class SpreadExecutor(Executor, Protocol):
    """Executor that may need the shortest and longest decode context of each step."""

    needs_decode_range: bool


def wants_spread(executor: Executor) -> bool:
    """Return whether an executor needs the shortest and longest decode context of each step."""
    return (
        hasattr(executor, "needs_decode_range")
        and cast(SpreadExecutor, executor).needs_decode_range
    )
