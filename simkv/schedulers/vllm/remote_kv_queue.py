# mypyc: compile
"""Waiting queue and block memory for requests that hold blocks while their KV is loaded."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from mypy_extensions import mypyc_attr

from simkv.core.block_pool import NO_BLOCKS
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.memory import CacheHits, VllmMemory
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import (
    FcfsQueue,
    PriorityQueue,
    RequestState,
    build_queue,
)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class RemoteKvQueue:
    """Waiting queue in which requests that hold blocks for their KV precede all other requests."""

    # Both queues have the order of the scheduling policy. In releases without the rule
    # ``queues_loads_apart``, all requests are in one queue.

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        self._holding: FcfsQueue | PriorityQueue = build_queue(config.policy, rules)
        self._rest: FcfsQueue | PriorityQueue = build_queue(config.policy, rules)
        self._holders: set[int] = set()
        self._apart = rules.queues_loads_apart

    def __len__(self) -> int:
        return len(self._holding) + len(self._rest)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._holding
        yield from self._rest

    def head(self) -> RequestState:
        return (self._holding if len(self._holding) else self._rest).head()

    def add(self, r: RequestState) -> None:
        self._rest.add(r)

    def put_back(self, r: RequestState) -> None:
        self._rest.put_back(r)

    def hold(self, r: RequestState) -> None:
        """Move ``r`` to the requests that hold blocks. Skip ``r`` in this step."""
        if not self._apart:
            self._rest.set_aside(r)
            return
        self._rest.remove(r)
        self._holders.add(r.id)
        self._holding.add(r)
        self._holding.set_aside(r)

    def remove(self, r: RequestState) -> None:
        self._place(r).remove(r)
        self._holders.discard(r.id)

    def set_aside(self, r: RequestState) -> None:
        self._place(r).set_aside(r)

    def restore_aside(self) -> list[RequestState]:
        return [*self._holding.restore_aside(), *self._rest.restore_aside()]

    def _place(self, r: RequestState) -> FcfsQueue | PriorityQueue:
        return self._holding if r.id in self._holders else self._rest


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class TakenBlocksMemory(VllmMemory):
    """KV blocks. ``taken`` contains the blocks that the current step allocates or shares."""

    def __init__(self, config: VllmConfig, rules: VllmRules, *, tables: bool) -> None:
        super().__init__(config, rules, tables=tables)
        self.taken: set[int] = set()
        self.fills_at_once = False

    def begin(self) -> None:
        self.taken.clear()

    def take(self, r: RequestState, count: int, end: int) -> None:
        super().take(r, count, end)
        if count:
            self.taken.update(self.table(r)[-count:])

    def share(self, r: RequestState, hits: CacheHits) -> None:
        super().share(r, hits)
        self.taken.update(self.table(r))

    def table(self, r: RequestState) -> array[int]:
        """Return the ids of the blocks of ``r``."""
        assert self.tables is not None
        return self.tables.tables.get(r.id, NO_BLOCKS)
