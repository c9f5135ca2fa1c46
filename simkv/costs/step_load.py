"""Executors say how long a step takes; the scheduler cannot tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from simkv.core.scheduler_protocol import Batch, DraftedTokens

Floats = npt.NDArray[np.float64]


class StepLoad(NamedTuple):
    """What a step makes the GPU do.

    ``prefill_seqs`` sequences compute ``prefill_tokens`` tokens on top of ``prefill_context``
    tokens of earlier KV; ``decode_seqs`` sequences compute one token each and read
    ``decode_context`` tokens of KV in all. ``prefill_pairs`` counts, over the prefills, the pairs
    of a token and a token that it attends to. ``emits`` sequences have a token sampled.
    ``shortest`` and ``longest`` are the KV that single decodes read; they are only filled in for an
    executor that asks for them (``compute_step_load``), else 0. ``group_ranks`` engines in
    lock-step compute ``group_tokens`` in all and ``group_most`` at most, 0 stands for an engine by
    itself. Before the step starts, ``lora_copies`` adapters are copied to the GPU, ``lora_reads``
    of them read from disk. Decodes verify ``draft_tokens`` beside their own tokens, and the drafter
    runs ``draft_passes`` times after the step.
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
    """Pairs of a token and a token that it attends to (itself included) in a prefill."""
    return tokens * context + tokens * (tokens + 1) // 2


def compute_step_load(batch: Batch, *, spread: bool = False) -> StepLoad:
    """Sum up the newest batch; in a mixed one a row of a single token on top of KV is a decode.

    Drafts do not count as tokens of their row. With ``spread`` the shortest and the longest decode
    are looked for, row by row.
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
    """Tokens of a row without its drafts."""
    return tokens - batch.drafted.tokens.get(i, 0) if batch.drafted else tokens


def _with_drafts(load: StepLoad, batch: Batch, drafted: DraftedTokens) -> StepLoad:
    """With the drafts that decodes verify; those beside a prompt are among its tokens."""
    prefill = {
        i
        for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True)
        if batch.kind == "prefill" or not context or _own(batch, i, tokens) > 1
    }
    tokens = sum(n for i, n in drafted.tokens.items() if i not in prefill)
    return load._replace(draft_tokens=tokens, draft_passes=drafted.passes if load.emits else 0)


class Executor(Protocol):
    """Runs a batch, for real or on paper; see ``SpreadExecutor``."""

    def run(self, load: StepLoad) -> float:
        """Seconds that a step with this load takes."""

    def forecast_steps(self, load: StepLoad, steps: int) -> Sequence[float] | Floats:
        """Seconds of each of the ``steps`` steps that would follow a step of nothing but decodes.

        Nothing counts as run until ``ran`` says how many of them were. An executor that cannot
        know returns none, and is asked step by step.
        """

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        """The first steps foreseen for ``load`` were run and took ``seconds``."""

    def idle(self) -> float:
        """Seconds that a pass takes in which the scheduler finds nothing to run."""


class SpreadExecutor(Executor, Protocol):
    """An executor that may ask for the shortest and longest decode of each step."""

    needs_decode_range: bool


def wants_spread(executor: Executor) -> bool:
    """Whether an executor asks for the shortest and longest decode; asked once per engine."""
    return (
        hasattr(executor, "needs_decode_range")
        and cast(SpreadExecutor, executor).needs_decode_range
    )
