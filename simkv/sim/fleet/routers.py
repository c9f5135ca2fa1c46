"""Routers choose the replica for a request.

They have no clock, no events and no knowledge of outcomes.

Each router except ``round_robin`` and ``random`` is modeled on a real router:

- ``least_loaded``: vLLM's data-parallel load balancer (vllm-project/vllm,
  ``vllm/v1/engine/core_client.py``, ``DPLBAsyncMPClient``; described in #41626). It chooses the
  replica with the lowest ``waiting * 4 + running``, and the first of equal replicas.
  ``vllm/v1/engine/coordinator.py`` reports loads every 100 ms; between two reports, the client
  counts its own new requests as waiting. If only ``in_flight_weight`` is set, this is the policy
  *shortest queue* of SGLang's router.
- ``power_of_two``: sgl-project/sglang, ``sgl-router/src/policies/power_of_two.rs``; Ray Serve has
  the same policy with cached queue lengths (ray-project/ray#42943).
- ``cache_aware``: ``sgl-router/src/policies/cache_aware.rs`` and its successor lightseekorg/smg,
  also the default of vLLM's router v0.1.15 (thresholds 0.3, 64 and 1.5). In simkv, as in
  vllm-project/production-stack's ``PrefixAwareRouter``, sent prompts are never evicted from the
  router's index.
- ``session``: the hash ring of vllm-project/production-stack, ``SessionRouter``. The original
  always uses the replica on the ring; very high thresholds have the same effect in simkv. With
  ``max_in_flight``, it is consistent hashing with bounded loads (arXiv 1608.01350).
- ``weighted``: llm-d's router with the plugins queue-scorer, kv-cache-utilization-scorer and
  prefix-cache-scorer, with the weights 2, 2 and 3 of its default configuration, and
  max-score-picker. The original limits its index of sent prefixes; simkv does not.
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
    PrefixKnowledge,
    RandomConfig,
    RouterConfig,
    SessionAdmissionConfig,
    SessionConfig,
    WeightedConfig,
    _Affine,
    _Scored,
)
from simkv.sim.fleet.cache_views import CacheView, PrefixMatch
from simkv.sim.fleet.session_admission import SessionAdmission

#: Type of a function that returns the session of a request.
SessionLookup = Callable[[Prompt], Hashable]
#: Number of points that a replica has on the hash ring.
RING_POINTS = 128


class LoadSignal(NamedTuple):
    """Load of a replica as the router sees it.

    - ``in_flight``: number of unfinished requests that the router sent to the replica.
    - ``waiting``, ``running``: queue lengths. ``kv_usage``: fraction of used blocks. These values
      can be out of date.
    - ``cache``: prefix cache of the replica as the router sees it; None if the router does not read
      it.
    """

    replica: int
    in_flight: int
    waiting: float = 0.0
    running: float = 0.0
    kv_usage: float = 0.0
    cache: CacheView | None = None


class Router(Protocol):
    """Base class of routers. A router chooses a replica for each request."""

    #: Whether the router reads the numbers of waiting and running requests (load), and the fraction
    #: of blocks in use (KV).
    reads_load: bool
    reads_kv: bool
    #: Whether requests sent by this router count as waiting until the next refresh.
    counts_own_sends: bool
    #: How the router reads the prefix caches of the replicas; None if it does not read them.
    knowledge: PrefixKnowledge | None

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:
        """Return the replica for ``prompt``.

        ``signals`` are the loads of the replicas, sorted by replica.
        """
        # ``signals`` is not empty.

    def forget(self, replica: int) -> None:
        """Forget which prompts were sent to a replica, because the replica has lost its cache."""


class _Forgets:
    """Base class of routers that store nothing about the caches of replicas."""

    knowledge: PrefixKnowledge | None = None

    def forget(self, replica: int) -> None:
        """Do nothing, because the router stores nothing about caches."""


class RoundRobinRouter(_Forgets):
    """Router that chooses the replicas in turn."""

    reads_load = reads_kv = counts_own_sends = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:  # noqa: ARG002
        index = bisect_left(signals, self._last + 1, key=lambda signal: signal.replica)
        self._last = signals[index % len(signals)].replica
        return self._last


class RandomRouter(_Forgets):
    """Router that chooses a random replica."""

    reads_load = reads_kv = counts_own_sends = False

    def __init__(self, config: RandomConfig) -> None:
        self._random = Random(config.seed)

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:  # noqa: ARG002
        return signals[_draw(self._random, len(signals))].replica


class ScoreRouter(_Forgets):
    """Base class of routers that compare the load scores of replicas."""

    def __init__(self, config: _Scored) -> None:
        self._weights = (config.waiting_weight, config.running_weight)
        self._in_flight, self._kv = config.in_flight_weight, config.kv_weight
        self.reads_load = any(self._weights)
        self.reads_kv = self._kv > 0
        self.counts_own_sends = config.count_own_sends

    def score(self, signal: LoadSignal) -> float:
        """Return the load score of a replica."""
        waiting, running = self._weights
        score = waiting * signal.waiting + running * signal.running
        return score + self._in_flight * signal.in_flight + self._kv * signal.kv_usage


class LeastLoadedRouter(ScoreRouter):
    """Router that chooses the replica with the lowest load score."""

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:  # noqa: ARG002
        return min(signals, key=self.score).replica


class PowerOfTwoRouter(ScoreRouter):
    """Router that chooses the less loaded of two random replicas."""

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
    """Base class of routers that send related requests to the same replica."""

    reads_load = reads_kv = counts_own_sends = False

    def __init__(self, config: _Affine) -> None:
        self._abs, self._rel = config.balance_abs_threshold, config.balance_rel_threshold

    def fewest(self, signals: Sequence[LoadSignal]) -> LoadSignal:
        """Return the signal of the replica with the fewest requests in flight."""
        return min(signals, key=lambda signal: signal.in_flight)

    def is_out_of_balance(self, most: int, fewest: int) -> bool:
        """Return whether the loads of two replicas are out of balance.

        ``most`` and ``fewest`` are their numbers of requests in flight. Both the difference and the
        ratio must exceed the thresholds.
        """
        return most - fewest > self._abs and most > self._rel * fewest


class SessionAffinityRouter(AffinityRouter):
    """Router that chooses a replica by consistent hashing of the session."""

    # If replicas are added or removed, only few sessions move to another replica.

    def __init__(self, config: SessionConfig, session: SessionLookup) -> None:
        super().__init__(config)
        self._session = session
        self._limit = config.max_in_flight
        self._ring: list[tuple[int, int]] = []
        self._on_ring: tuple[int, ...] = ()

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:
        self._set_ring(tuple(signal.replica for signal in signals))
        point = (_hash(f"s{self._session(prompt)}"), -1)
        place = bisect_left(self._ring, point)
        home = self._ring[place % len(self._ring)][1]
        loads = {signal.replica: signal.in_flight for signal in signals}
        if self._limit is not None and loads[home] >= self._limit:
            around = (self._ring[(place + i) % len(self._ring)][1] for i in range(len(self._ring)))
            home = next((one for one in around if loads[one] < self._limit), home)
        load = loads[home]
        fewest = self.fewest(signals)
        return fewest.replica if self.is_out_of_balance(load, fewest.in_flight) else home

    def _set_ring(self, replicas: tuple[int, ...]) -> None:
        if replicas != self._on_ring:
            self._on_ring = replicas
            self._ring = sorted(
                (_hash(f"r{i}.{n}"), i) for i in replicas for n in range(RING_POINTS)
            )


class SentPrompts:
    """Record of the prompt prefixes that a router has sent to each replica."""

    def __init__(self, block_size: int) -> None:
        self._blocks = BlockKeys(block_size)
        self._keys: list[int] = []  # of the latest prompt
        #: Keys of all blocks sent to each replica, by replica.
        self._sent: dict[int, set[int]] = {}

    def find(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> list[PrefixMatch]:
        """Return, for each replica, the longest prefix of ``prompt`` that was sent to it."""
        keys: list[int] = []
        self._blocks.extend(keys, TokenContent(prompt), prompt.prompt_tokens)
        self._keys, size = keys, self._blocks.block_size
        each: list[Set[int]] = [self._sent.get(signal.replica, frozenset()) for signal in signals]
        return [PrefixMatch(_known(keys, s) * size, len(keys) * size, len(s)) for s in each]

    def record_sent(self, replica: int) -> None:
        """Record that the latest prompt was sent to ``replica``."""
        self._sent.setdefault(replica, set()).update(self._keys)

    def forget(self, replica: int) -> None:
        """Forget the prompts sent to a replica."""
        self._sent.pop(replica, None)


class ReportedCaches(_Forgets):
    """Prefixes that the replicas report as cached in ``LoadSignal.cache``."""

    def find(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> list[PrefixMatch]:
        """Return, for each replica, the longest prefix of ``prompt`` that it has cached."""
        return [signal.cache.find(prompt) for signal in signals if signal.cache]

    def record_sent(self, replica: int) -> None:
        """Do nothing, because only the replicas report what they cache."""


def _prefixes(config: PrefixKnowledge, block_size: int) -> SentPrompts | ReportedCaches:
    return ReportedCaches() if config.reads_caches else SentPrompts(block_size)


class PrefixAffinityRouter(AffinityRouter):
    """Router that chooses the replica with the longest known prefix of the prompt.

    If this prefix is too short, it chooses the replica with the fewest known blocks. If the loads
    are out of balance, it chooses the replica with the fewest requests in flight.
    """

    def __init__(self, config: CacheAwareConfig) -> None:
        super().__init__(config)
        self._threshold = config.cache_threshold
        self.knowledge: PrefixKnowledge | None = config if config.reads_caches else None
        self._prefixes = _prefixes(config, config.block_size)

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:
        chosen = self._choose(self._prefixes.find(prompt, signals), prompt, signals)
        self._prefixes.record_sent(chosen)
        return chosen

    def _choose(
        self, found: Sequence[PrefixMatch], prompt: Prompt, signals: Sequence[LoadSignal]
    ) -> int:
        fewest = self.fewest(signals)
        most = max(signal.in_flight for signal in signals)
        if self.is_out_of_balance(most, fewest.in_flight):
            return fewest.replica
        lengths = [match.tokens for match in found]
        if max(lengths) > self._threshold * prompt.prompt_tokens:
            return signals[lengths.index(max(lengths))].replica
        blocks = [match.blocks for match in found]
        return signals[blocks.index(min(blocks))].replica

    def forget(self, replica: int) -> None:
        """Forget which prompts were sent to a replica, because the replica has lost its cache."""
        self._prefixes.forget(replica)


class WeightedRouter:
    """Router that chooses the replica with the highest weighted sum of three scores.

    The scores are for queue length, KV usage and shared prefix.
    """

    def __init__(self, config: WeightedConfig) -> None:
        self._config = config
        self.reads_load = config.queue_weight > 0
        self.reads_kv = config.kv_weight > 0
        self.counts_own_sends = config.count_own_sends
        self._random = Random(config.seed)
        self.knowledge: PrefixKnowledge | None = config if config.reads_caches else None
        self._prefixes = _prefixes(config, config.block_size)

    def choose(self, prompt: Prompt, signals: Sequence[LoadSignal]) -> int:
        queues = [signal.waiting for signal in signals]
        longest, spread = max(queues), max(queues) - min(queues)
        scores = []
        for signal, found in zip(signals, self._prefixes.find(prompt, signals), strict=True):
            queue = (longest - signal.waiting) / spread if spread else 1.0
            scores.append(
                self._config.queue_weight * queue
                + self._config.kv_weight * (1.0 - signal.kv_usage)
                + self._config.prefix_weight * (found.tokens / found.of if found.of else 0.0)
            )
        best = [i for i, score in enumerate(scores) if score == max(scores)]
        chosen = signals[best[_draw(self._random, len(best))]].replica
        self._prefixes.record_sent(chosen)
        return chosen

    def forget(self, replica: int) -> None:
        """Forget which prompts were sent to a replica, because the replica has lost its cache."""
        self._prefixes.forget(replica)


def build_router(config: RouterConfig, session: SessionLookup) -> Router:
    """Build the router of a scenario. The function ``session`` returns the session of a request."""
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
        case WeightedConfig():
            return WeightedRouter(config)
        case SessionAdmissionConfig():
            return SessionAdmission(config, session)
        case _:
            return RoundRobinRouter()


def _known(keys: Sequence[int], sent: Set[int]) -> int:
    """Return the number of leading ``keys`` that were sent."""
    # A key is sent only together with all earlier keys, so bisection finds the number.
    return bisect_left(keys, 1, key=lambda key: key not in sent)


def _draw(random: Random, count: int) -> int:
    """Return a random integer below ``count``."""
    # The result is the same in every Python version. ``random()`` returns a number in [0, 1).
    return int(random.random() * count)


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
