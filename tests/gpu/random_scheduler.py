"""A scheduler that decides at random: chunks, mixed steps, preemptions and shared blocks.

Its decisions are more varied than the decisions of any engine. The tokens emitted by a request must
not depend on these decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from simkv.core.block_pool import BlockPool
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import BatchRow, blocks_for
from simkv.costs.hardware.model_shape import ModelShape
from simkv.gpu.batch_runner import Runner, RunnerConfig
from simkv.gpu.kv_pool import KVPool


@dataclass
class Live:
    """A running request: its number of tokens with KV, and its tokens in order."""

    prompt: Prompt
    output: int
    computed: int = 0
    promised: int = 0
    emitted: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def known(self) -> int:
        return self.prompt.prompt_tokens + self.promised


class RandomServer:
    """Serves ``requests`` random requests to their end, in any order; see ``run``.

    Without ``poison``, blocks retain their content, so that it can be compared at the end.
    """

    def __init__(
        self,
        seed: int,
        shape: ModelShape,
        *,
        block_size: int,
        requests: int = 6,
        graph_tokens: int = 64,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        poison: bool = True,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.block_size = block_size
        num_blocks = max(12, blocks_for(150, block_size))
        config = RunnerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            seats=requests,
            max_len=128,
            max_decodes=8,
            graph_tokens=graph_tokens,
            seed=seed,
        )
        self.runner = Runner(shape, config, device, dtype)
        self.pool = BlockPool(num_blocks)
        self.live = [self._request(i) for i in range(requests)]
        self.seen: dict[str, int] = {}
        self.poison = poison
        self.runner.pool.blocks.zero_()
        self._poison_free()

    def _request(self, i: int) -> Live:
        """Return a request; every other request begins like request 0."""
        tokens = int(self.random.integers(1, 60))
        segments: tuple[Segment, ...] = ()
        if i % 2 == 0:
            shared = int(self.random.integers(1, tokens + 1))
            segments = (Segment("gx", 0, shared), Segment(f"u{i}", 0, tokens - shared))
        prompt = Prompt(i, tokens, 20, segments=segments)
        self.runner.admit(prompt)
        return Live(prompt, int(self.random.integers(1, 20)))

    def run(self) -> list[Live]:
        """Serve all requests to their end; two steps are in flight at a time."""
        flights = []
        while any(live.promised < live.output for live in self.live):
            rows, emits = self._choose()
            if rows:
                flights.append(self.runner.launch(rows, emits, self.pool.tables))
            for live in self.live:
                if live.promised == live.output and live.prompt.id in self.pool.tables:
                    self._free(live)
            if len(flights) == 2:
                self._deliver(flights.pop(0))
        for flight in flights:
            self._deliver(flight)
        return self.live

    def _deliver(self, flight) -> None:
        done = self.runner.wait(flight)
        assert done.timing.unbacked == 0
        for i, token in done.tokens.items():
            self.live[i].emitted.append(token)

    def _choose(self) -> tuple[list[BatchRow], set[int]]:
        rows, emits = [], set()
        for index in self.random.permutation(len(self.live)):
            live = self.live[index]
            i = live.prompt.id
            if live.promised == live.output or self.random.random() < 0.2:
                continue
            if i in self.pool.tables and self.random.random() < 0.08:
                self._preempt(live)
                continue
            if i not in self.pool.tables:
                self._share(live)
            left = live.known - live.computed
            new = left if self.random.random() < 0.5 else int(self.random.integers(1, left + 1))
            need = blocks_for(live.computed + new, self.block_size) - self.pool.held(i)
            if need > self.pool.free:
                self._preempt(live)
                continue
            self.pool.take(i, need)
            rows.append(BatchRow(i, new, live.computed))
            self._count("chunk" if left > new or (live.computed and new > 1) else "whole")
            live.computed += new
            if new == left:
                emits.add(i)
                live.promised += 1
        if len({row.tokens == 1 for row in rows}) == 2:
            self._count("mixed")
        return rows, emits

    def _share(self, live: Live) -> None:
        """Start the request from the blocks of another request that begins with the same tokens."""
        mine = live.prompt.segments
        for other in self.live:
            table = self.pool.tables.get(other.prompt.id)
            if other is live or not table or not mine or not other.prompt.segments:
                continue
            same = min(mine[0].end, other.prompt.segments[0].end, other.computed)
            blocks = min(same, live.known - 1) // self.block_size
            if blocks:
                self.pool.share(live.prompt.id, table[:blocks])
                live.computed = blocks * self.block_size
                self._count("shared")
                return

    def _preempt(self, live: Live) -> None:
        if live.computed:
            self._count("recomputed")
        live.computed = 0
        self._free(live)

    def _free(self, live: Live) -> None:
        self.pool.release(live.prompt.id)
        self._poison_free()

    def _poison_free(self) -> None:
        """Fill free blocks with NaN, so that a step that reads a free block produces NaN."""
        for block in range(1, self.pool.num_blocks + 1):
            if self.poison and self.pool.is_free(block):
                self.runner.pool.blocks[block] = torch.nan

    def _count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1


def same_kv(a: KVPool, b: KVPool) -> bool:
    """Return whether two pools have equal bits and are not all zero.

    The null block is excluded, because padding rows write undefined values into it.
    """
    return torch.equal(a.blocks[1:], b.blocks[1:]) and bool(a.blocks[1:].any())
