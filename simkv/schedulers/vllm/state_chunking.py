# mypyc: compile
"""Chunks of prompts for models with recurrent states, aligned to blocks so that the prefix cache
can store the states.

The model writes a state at the end of a chunk, and the prefix cache stores states at the end of a
block, so vLLM ends chunks at block ends. Source: ``Scheduler._mamba_block_aligned_split`` since
0.21.0, for groups of one block size and without drafts.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState


def has_inner_state(start: int, end: int, proof: int, size: int) -> bool:
    """Return whether the kernel also writes a state inside the chunk from ``start`` to ``end``.

    ``proof`` is the length of the whole prefill, and ``size`` is the block size, both in tokens.
    The kernel writes this state at the last multiple of ``size`` below ``proof``. The multiple must
    be inside the chunk and at least one block after ``start``.
    """
    last = (proof - 1) // size * size
    reaches = blocks_for(end, size) > start // size + 1
    return start % size == 0 and start + size <= last < end and reaches


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class StateChunking:
    """Alignment of the ends of chunks to the ends of blocks."""

    # ``size`` is the number of tokens per block; all counts are in tokens.

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        self.size = config.block_size
        largest = config.most_scheduled(rules)
        self._largest = min(largest, config.long_prefill_token_threshold or largest)
        self._wide, self._at_any = rules.allows_large_state_blocks, rules.splits_chunks_at_hits
        self._at_first = rules.splits_first_chunk_at_hits or self._at_any
        self._left = 1 if rules.stores_second_last_state else 0
        self._drops = config.drops_block(rules)
        self._within = config.mamba_prefill_checkpoints

    def clip(self, r: RequestState, start: int, n: int, *, waits: bool) -> int:
        """Return the number of tokens after ``start`` to compute, at most ``n``.

        The result is 0 if ``n`` tokens do not reach the end of a block. ``waits`` is true if ``r``
        waits for admission.
        """
        # With ``waits``, the prefix-cache hit of ``r`` is known.
        prefill = max(r.prompt.prompt_tokens, r.length - 1)
        if start >= prefill:
            return n
        size, end = self.size, start + n
        # the last block end at which a reusable state exists
        last = (r.length - self._left) // size * size
        if self._drops:  # one block before the last block of the other groups
            last = r.length // size * size - size
        if end < (prefill if self._wide else last):
            aligned = end // size * size
            if not self._wide or aligned > start or size <= self._largest:
                end = aligned
        within = self._within and end >= prefill and has_inner_state(start, end, prefill, size)
        stops = [0 if within else last]
        if self._wide and start % size:
            stops.append((start // size + 1) * size)
        if start < r.junction < end and (self._at_first if waits else self._at_any):
            stops.append(start + (r.junction - start) // size * size)
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)
