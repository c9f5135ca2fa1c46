"""vLLM's V1 scheduler, but a preempted request's KV goes to host memory and comes back.

A variant of our own, to ask what recompute costs: V1 only recomputes. V0 could swap (vLLM up to
0.9, ``--preemption-mode swap`` with ``--swap-space``), and this takes its rule that all blocks of a
victim go, or none if the host has no room for them. Who is preempted and admitted when is V1's.
"""

from __future__ import annotations

from collections.abc import Hashable

from mypy_extensions import mypyc_attr

from simkv.core.blocks import BlockPool
from simkv.core.scheduler import Batch, Swap, blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.requests import RequestState
from simkv.schedulers.vllm.rules import VllmRules
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.step import Step


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmSwapScheduler(VllmScheduler):
    """Preempted requests keep their ``computed`` tokens as far as ``num_cpu_blocks`` reach."""

    def __init__(
        self, config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
    ) -> None:
        super().__init__(config, rules, tables=tables)
        self._host_free = config.num_cpu_blocks
        self._swapped: dict[int, int] = {}  # blocks in host memory, by request
        self._out: list[Swap] = []
        self._in: list[Swap] = []

    def fingerprint(self) -> Hashable:
        swapped = tuple(self._swapped.items())
        return super().fingerprint(), swapped, tuple(r.computed for r in self.waiting)

    def _keep(self, r: RequestState) -> int:
        # A token under way will count though its request is preempted; its own KV is not computed.
        tokens = min(r.computed, r.length + r.placeholders - 1)
        blocks = blocks_for(tokens, self.config.block_size)
        if not 0 < blocks <= self._host_free:
            return 0
        self._host_free -= blocks
        self._swapped[r.id] = blocks
        self._out.append(Swap(r.id, blocks, self._blocks_of(r, blocks)))
        return tokens

    def _grant(self, r: RequestState, n: int, blocks: int, step: Step) -> None:
        if r.id not in self._swapped:
            return super()._grant(r, n, blocks, step)
        # Admission counts the blocks of all its tokens, those that come back among them.
        super()._grant(r, n, blocks, step)
        count = self._swapped.pop(r.id)
        self._host_free += count
        self._in.append(Swap(r.id, count, self._blocks_of(r, count)))
        return None

    def _dispatch(self, step: Step) -> Batch:
        batch = super()._dispatch(step)
        if batch:  # else the copies wait for the next step that runs
            batch.swapped_out, self._out = self._out, []
            batch.swapped_in, self._in = self._in, []
        return batch

    def _remove(self, r: RequestState) -> None:
        self._host_free += self._swapped.pop(r.id, 0)
        super()._remove(r)

    def _blocks_of(self, r: RequestState, count: int) -> tuple[int, ...]:
        """The numbers of its first ``count`` blocks, where they have any."""
        return tuple(self.pool.tables[r.id][:count]) if isinstance(self.pool, BlockPool) else ()
