"""Prefix caches of replicas as a router sees them: as they are now, or by delayed KV events.

Delayed events model the indexers of llm-d's router and of Dynamo, which receive the events that
engines publish when a block enters or leaves the prefix cache.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import takewhile
from typing import NamedTuple

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import prefix_reporter
from simkv.scenario.fleet_section import PrefixKnowledge
from simkv.sim.replica_base import Replica


class PrefixMatch(NamedTuple):
    """Part of a prompt that a replica has cached, as far as a router knows.

    - ``tokens``: length of this part in tokens. ``of``: number of tokens in all full blocks of the
      prompt.
    - ``blocks``: number of all cached blocks of the replica.
    """

    tokens: int
    of: int
    blocks: int


class CacheView:
    """Present contents of a replica's prefix cache. Lookups do not change the cache."""

    def __init__(self, engine: Replica) -> None:
        reporter = prefix_reporter(engine.scheduler)
        assert reporter
        assert reporter.cache
        self._engine, self._reporter, self._pool = engine, reporter, reporter.cache

    def find(self, prompt: Prompt) -> PrefixMatch:
        """Return the longest cached prefix of ``prompt``."""
        self._engine.catch_up()
        keys, size = self._reporter.prefix_keys(prompt), self._reporter.block_size
        return PrefixMatch(self._count(keys) * size, len(keys) * size, self._blocks())

    def _count(self, keys: list[int]) -> int:
        return len(self._pool.lookup(keys))

    def _blocks(self) -> int:
        return self._pool.cached


class DelayedCacheView(CacheView):
    """Contents of a replica's prefix cache ``delay`` seconds ago."""

    def __init__(self, engine: Replica, delay: float) -> None:
        super().__init__(engine)
        self._delay = delay
        self._keys = self._pool.keys().copy()
        #: Time of each change, and the keys that were removed and added.
        self._events: deque[tuple[float, list[int], list[int]]] = deque()
        # Several blocks can have the same key.
        self._known = Counter(self._keys[self._keys > 0].tolist())
        engine.on_cache_change = self._record

    def _record(self, now: float) -> None:
        """Record which blocks entered or left the cache at ``now`` (s)."""
        keys = self._pool.keys()
        changed = (keys != self._keys).nonzero()[0]
        if len(changed):
            before, after = self._keys[changed], keys[changed]
            self._events.append((now, before[before > 0].tolist(), after[after > 0].tolist()))
            self._keys[changed] = after

    def find(self, prompt: Prompt) -> PrefixMatch:
        self._engine.catch_up()
        while self._events and self._events[0][0] + self._delay <= self._engine.env.now:
            _, removed, added = self._events.popleft()
            self._known.update(added)
            for key in removed:
                self._known[key] -= 1
                if not self._known[key]:
                    del self._known[key]
        return super().find(prompt)

    def _count(self, keys: list[int]) -> int:
        return sum(1 for _ in takewhile(self._known.__contains__, keys))

    def _blocks(self) -> int:
        return self._known.total()


def build_cache_view(engine: Replica, knowledge: PrefixKnowledge) -> CacheView:
    """Return the view that a router has of a replica's cache.

    ``knowledge`` describes how the router learns about the cache.
    """
    if knowledge.prefix_knowledge == "events":
        return DelayedCacheView(engine, knowledge.event_delay)
    return CacheView(engine)
