# mypyc: compile
"""Load of a step, and the executor protocol that returns its duration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from simkv.core.scheduler_protocol import Batch, DraftedTokens

Floats = npt.NDArray[np.float64]


class StepLoad(NamedTuple):
    """Work of the GPU in a step.

    ``prefill_seqs`` sequences compute ``prefill_tokens`` tokens on top of ``prefill_context``
    tokens of earlier KV; ``decode_seqs`` sequences compute one token each and read
    ``decode_context`` tokens of KV in total. ``prefill_pairs`` counts the pairs of a prefill token
    and a token that it attends to. ``emits`` sequences have a token sampled. ``shortest`` and
    ``longest`` are the KV lengths of single decodes, set only for an executor that needs them
    (``compute_step_load``), else 0. ``group_ranks`` engines in lock-step compute ``group_tokens``
    in total and at most ``group_most`` each; 0 means a single engine. Before the step,
    ``lora_copies`` adapters are copied to the GPU, ``lora_reads`` of them read from disk. Decodes
    verify ``draft_tokens`` in addition to their own tokens, and the drafter runs ``draft_passes``
    times after the step.
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
    """Return the pairs of a token and a token that it attends to (or itself) in a prefill."""
    return tokens * context + tokens * (tokens + 1) // 2


def compute_step_load(batch: Batch, *, spread: bool = False) -> StepLoad:
    """Return the load of a batch; in a mixed batch, a row of one token on top of KV is a decode.

    Draft tokens do not count as tokens of their row. With ``spread``, the shortest and the longest
    decode are determined, row by row.
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
    """Return the tokens of a row without its draft tokens."""
    return tokens - batch.drafted.tokens.get(i, 0) if batch.drafted else tokens


def _with_drafts(load: StepLoad, batch: Batch, drafted: DraftedTokens) -> StepLoad:
    """Add the draft tokens that decodes verify; prefill tokens already include theirs."""
    prefill = {
        i
        for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True)
        if batch.kind == "prefill" or not context or _own(batch, i, tokens) > 1
    }
    tokens = sum(n for i, n in drafted.tokens.items() if i not in prefill)
    return load._replace(draft_tokens=tokens, draft_passes=drafted.passes if load.emits else 0)


class Executor(Protocol):
    """Protocol that runs a batch, simulated or real (see ``SpreadExecutor``)."""

    def run(self, load: StepLoad) -> float:
        """Return the seconds of a step with this load."""

    def forecast_steps(self, load: StepLoad, steps: int) -> Sequence[float] | Floats:
        """Return the seconds of each of the ``steps`` steps after a step of decodes only.

        Steps count as run only when reported to ``ran``. An executor that cannot forecast returns
        an empty sequence and is called step by step.
        """

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        """Record that the first forecast steps for ``load`` were run and took ``seconds``."""

    def idle(self) -> float:
        """Return the seconds of a scheduler pass with nothing to run."""


class SpreadExecutor(Executor, Protocol):
    """Executor that may need the shortest and longest decode of each step."""

    needs_decode_range: bool


def wants_spread(executor: Executor) -> bool:
    """Return whether an executor needs the shortest and longest decode; checked once per engine."""
    return (
        hasattr(executor, "needs_decode_range")
        and cast(SpreadExecutor, executor).needs_decode_range
    )
