"""Routers: which replica a request goes to. Pure: no clock, no events, no sight of the outcome.

What they are modelled on:

- ``least_loaded``: vLLM's own data-parallel balancer (vllm-project/vllm,
  ``vllm/v1/engine/core_client.py``, ``DPLBAsyncMPClient``; #41626 describes it): the lowest
  ``waiting * 4 + running``, of equals the first, reported every 100 ms by
  ``vllm/v1/engine/coordinator.py``; in between the client counts what it sent as waiting. With
  ``in_flight_weight`` alone it is the shortest queue of SGLang's router.
- ``power_of_two``: sgl-project/sglang, ``sgl-router/src/policies/power_of_two.rs``; Ray Serve does
  the same with queue lengths that it caches (ray-project/ray#42943).
- ``cache_aware``: ``sgl-router/src/policies/cache_aware.rs`` and its successor lightseekorg/smg,
  also the default of vLLM's router v0.1.15: thresholds 0.3, 64 and 1.5. Here, as in
  vllm-project/production-stack's ``PrefixAwareRouter``, what was sent is never forgotten.
- ``session``: the hash ring of vllm-project/production-stack, ``SessionRouter``. It has no escape;
  very high thresholds make it so here too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence, Set
from hashlib import blake2b
from random import Random
from typing import NamedTuple, Protocol

from simkv.core.block_keys import BlockKeys, TokenContent
from simkv.core.request import Prompt
from simkv.scenario.fleet_section import (
    CacheAwareConfig,
    LeastLoadedConfig,
    PowerOfTwoConfig,
    RandomConfig,
    RouterConfig,
    SessionConfig,
    _Affine,
    _Scored,
)

#: What session a request belongs to.
SessionLookup = Callable[[Prompt], Hashable]
#: Points of a replica on the hash ring.
RING_POINTS = 128


class LoadSignal(NamedTuple):
    """What a router knows of a ``replica`` that it may choose.

    ``waiting``, ``running`` and ``kv_usage`` (the share of blocks in use) may be old;
    ``in_flight`` is how many requests the router has sent there that have not ended.
    """

    replica: int
    in_flight: int
    waiting: float = 0.0
    running: float = 0.0
    kv_usage: float = 0.0


class Router(Protocol):
    """Chooses a replica for each request."""

    #: Whether it reads how many wait and run, and how many blocks are in use.
    reads_load: bool
    reads_kv: bool
    #: Whether what it sends counts as waiting until the next refresh.
    counts_own_sends: bool

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:
        """The replica that ``prompt`` goes to: one of ``signals``, of which there is at least one.

        They come in ascending order of replicas.
        """

    def forget(self, replica: int) -> None:
        """The replica has lost its cache."""


class _Forgets:
    """A router that remembers nothing of the replicas' caches."""

    def forget(self, replica: int) -> None:
        """Nothing to do."""


class RoundRobinRouter(_Forgets):
    """The next replica in order after the last one chosen."""

    reads_load = reads_kv = counts_own_sends = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:  # noqa: ARG002
        index = bisect_left(signals, self._last + 1, key=lambda signal: signal.replica)
        self._last = signals[index % len(signals)].replica
        return self._last


class RandomRouter(_Forgets):
    """A replica drawn at random."""

    reads_load = reads_kv = counts_own_sends = False

    def __init__(self, config: RandomConfig) -> None:
        self._random = Random(config.seed)

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:  # noqa: ARG002
        return signals[_draw(self._random, len(signals))].replica


class ScoreRouter(_Forgets):
    """What the routers that compare scores have in common."""

    def __init__(self, config: _Scored) -> None:
        self._weights = (config.waiting_weight, config.running_weight)
        self._in_flight, self._kv = config.in_flight_weight, config.kv_weight
        self.reads_load = any(self._weights)
        self.reads_kv = self._kv > 0
        self.counts_own_sends = config.count_own_sends

    def score(self, signal: LoadSignal) -> float:
        """How loaded a replica is."""
        waiting, running = self._weights
        score = waiting * signal.waiting + running * signal.running
        return score + self._in_flight * signal.in_flight + self._kv * signal.kv_usage


class LeastLoadedRouter(ScoreRouter):
    """The replica of the lowest score."""

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:  # noqa: ARG002
        return min(signals, key=self.score).replica


class PowerOfTwoRouter(ScoreRouter):
    """The less loaded one of two replicas drawn at random."""

    def __init__(self, config: PowerOfTwoConfig) -> None:
        super().__init__(config)
        self._random = Random(config.seed)

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:  # noqa: ARG002
        first = _draw(self._random, len(signals))
        if len(signals) == 1:
            return signals[0].replica
        second = _draw(self._random, len(signals) - 1)
        second += second >= first
        return min(signals[first], signals[second], key=self.score).replica


class AffinityRouter(_Forgets):
    """What the routers that keep requests together have in common."""

    reads_load = reads_kv = counts_own_sends = False

    def __init__(self, config: _Affine) -> None:
        self._abs, self._rel = config.balance_abs_threshold, config.balance_rel_threshold

    def fewest(self, signals: Sequence[LoadSignal]) -> LoadSignal:
        """The replica with the fewest requests in flight."""
        return min(signals, key=lambda signal: signal.in_flight)

    def is_out_of_balance(self, most: int, fewest: int) -> bool:
        """Whether the difference of loads passes both thresholds."""
        return most - fewest > self._abs and most > self._rel * fewest


class SessionAffinityRouter(AffinityRouter):
    """A replica per session, found on a ring of hashes: when replicas come and go, few move."""

    def __init__(self, config: SessionConfig, session: SessionLookup) -> None:
        super().__init__(config)
        self._session = session
        self._ring: list[tuple[int, int]] = []
        self._on_ring: tuple[int, ...] = ()

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:
        self._set_ring(tuple(signal.replica for signal in signals))
        point = (_hash(f"s{self._session(prompt)}"), -1)
        home = self._ring[bisect_left(self._ring, point) % len(self._ring)][1]
        load = next(signal.in_flight for signal in signals if signal.replica == home)
        fewest = self.fewest(signals)
        return fewest.replica if self.is_out_of_balance(load, fewest.in_flight) else home

    def _set_ring(self, replicas: tuple[int, ...]) -> None:
        if replicas != self._on_ring:
            self._on_ring = replicas
            self._ring = sorted(
                (_hash(f"r{i}.{n}"), i) for i in replicas for n in range(RING_POINTS)
            )


class PrefixAffinityRouter(AffinityRouter):
    """The replica that was sent the longest part of the prompt before."""

    def __init__(self, config: CacheAwareConfig) -> None:
        super().__init__(config)
        self._threshold = config.cache_threshold
        self._blocks = BlockKeys(config.block_size)
        #: By replica the keys of all blocks that were sent there.
        self._sent: dict[int, set[int]] = {}

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:
        keys: list[int] = []
        self._blocks.extend(keys, TokenContent(prompt), prompt.prompt_tokens)
        chosen = self._choose(keys, prompt, signals)
        self._sent.setdefault(chosen, set()).update(keys)
        return chosen

    def _choose(self, keys: Sequence[int], prompt: Prompt, signals: Sequence[LoadSignal]) -> int:
        fewest = self.fewest(signals)
        most = max(signal.in_flight for signal in signals)
        if self.is_out_of_balance(most, fewest.in_flight):
            return fewest.replica
        matched, best = 0, -1
        for signal in signals:
            length = _known(keys, self._sent.get(signal.replica, frozenset()))
            if length > matched:
                matched, best = length, signal.replica
        if matched * self._blocks.block_size > self._threshold * prompt.prompt_tokens:
            return best
        return min(signals, key=lambda s: len(self._sent.get(s.replica, ()))).replica

    def forget(self, replica: int) -> None:
        """The replica has lost its cache."""
        self._sent.pop(replica, None)


def build_router(config: RouterConfig, session: SessionLookup) -> Router:
    """The router of a scenario; ``session`` says which session a request belongs to."""
    match config:
        case RandomConfig():
            return RandomRouter(config)
        case LeastLoadedConfig():
            return LeastLoadedRouter(config)
        case PowerOfTwoConfig():
            return PowerOfTwoRouter(config)
        case SessionConfig():
            return SessionAffinityRouter(config, session)
        case CacheAwareConfig():
            return PrefixAffinityRouter(config)
        case _:
            return RoundRobinRouter()


def _known(keys: Sequence[int], sent: Set[int]) -> int:
    """How many of the first ``keys`` were sent; a key is never sent without those before it."""
    return bisect_left(keys, 1, key=lambda key: key not in sent)


def _draw(random: Random, count: int) -> int:
    """A whole number below ``count``; ``random()`` is the same in every version of Python."""
    return int(random.random() * count)


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
