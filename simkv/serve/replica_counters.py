"""Count the events of a replica while it serves. Times are simulated seconds.

``prometheus_exposition`` exports the counters under the names of the engine's metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from simkv.core.outcome import Outcome
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import DraftCounts, RequestRecord

#: The engine's finish reason for requests whose client left.
_REASONS = {Outcome.STARVED: "abort", Outcome.TIMED_OUT: "abort"}
#: Values of labels that are exported even before their first count.
LABELS = {
    "ended_by_reason": ("stop", "length", "abort", "error", "repetition"),
    "prompt_by_source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
    "cached_by_source": ("device",),
    "turned_away": ("max_num_queued_reqs", "max_num_queued_tokens"),
}
#: A number, or several numbers by label value.
MeasuredValue = float | Mapping[str, float]


class BucketHistogram:
    """Histogram with one bucket per bound, and one bucket for larger values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def combine(self, other: BucketHistogram) -> BucketHistogram:
        """Return the sum of two histograms."""
        both = BucketHistogram(self.bounds)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.total = self.total + other.total
        return both


class RequestCounters:
    """Counts and histograms of all streamed, or of all other requests."""

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self.counts: Counter[str] = Counter()
        self.by_label = {measure: Counter(dict.fromkeys(v, 0)) for measure, v in LABELS.items()}
        self.histograms = {measure: BucketHistogram(those) for measure, those in bounds.items()}

    def observe(self, measure: str, value: float) -> None:
        """Add a value to the histogram of a quantity, if the engine exports it."""
        if spread := self.histograms.get(measure):
            spread.add(value)


class AdapterUsage:
    """LoRA adapters in use, and the time of their last use, as vLLM 0.33.0 reports them.

    A request counts from its first token on (``EngineCoreOutput.events``). Its adapter is reported
    both as running and as waiting (``LoRARequestStates.update_scheduler_stats``).
    """

    def __init__(self) -> None:
        self._in_use: Counter[str] = Counter()
        self._at: float | None = None
        self._last_used: dict[str, float] = {}

    def change(self, name: str | None, by: int, now: float) -> None:
        """Change the number of requests that use the adapter ``name`` by ``by`` at ``now`` (s).

        If ``name`` is None, only record that a step has ended.
        """
        if now != self._at:
            self.last_used()
        self._at = now
        if name is not None:
            self._in_use[name] += by
            if not self._in_use[name]:
                del self._in_use[name]

    @property
    def decoding(self) -> int:
        """Number of adapters of requests that have emitted a token and have not ended."""
        return len(self._in_use)

    def last_used(self) -> dict[str, float]:
        """Return the time (s) at which each set of adapters was last in use.

        A set is a comma-separated list of names.
        """
        if self._at is not None:
            self._last_used[",".join(self._in_use)] = self._at
        return self._last_used


class ReplicaCounters:
    """Counters of one replica, separate for streamed and other replies.

    ``bounds`` contains the bucket bounds of each quantity. ``streams`` returns whether a reply is
    streamed, and ``reason`` returns its finish reason. ``accepted`` counts accepted draft tokens by
    position. ``lora_slots`` is the maximum number of adapters in use at a time.
    """

    def __init__(
        self,
        replica: Replica,
        block_size: int,
        bounds: Mapping[str, Sequence[float]],
        streams: Callable[[int], bool],
        reason: Callable[[RequestRecord, int], str],
    ) -> None:
        self.replica = replica
        self.tallies = {True: RequestCounters(bounds), False: RequestCounters(bounds)}
        self._block_size = block_size
        self._streams, self._reason = streams, reason
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: Counter[int] = Counter()
        self._rows = 0
        self.adapters = AdapterUsage()
        self.accepted: list[int] = []
        self.lora_slots = 0

    def count_tokens(self, numbers: Iterable[int]) -> None:
        """Count new tokens. ``numbers`` contains the request of each token."""
        now, last = self.replica.env.now, self._last
        self.adapters.change(None, 0, now)
        for number, times in groupby(numbers):
            tally, tokens = self.tallies[self._streams(number)], len(list(times))
            tally.counts["generation_tokens"] += tokens
            self._tokens[number] += tokens
            for position in range(min(tokens - 1, len(self.accepted))):
                self.accepted[position] += 1
            before = last.get(number)
            if before is None:
                self._begin(number, tally, now)
            else:
                tally.observe("itl", now - before)
            last[number] = now

    def _begin(self, number: int, tally: RequestCounters, now: float) -> None:
        """Count the first token of a reply."""
        life = self.replica.record.requests[number]
        self._first[number] = now
        self.adapters.change(life.request.lora, 1, now)
        cached, prompt = self._cached(life), life.request.prompt_tokens
        tally.observe("ttft", now - life.request.arrival)
        tally.counts["prompt_tokens"] += prompt
        tally.counts["queried"] += prompt
        tally.counts["cached"] += cached
        tally.by_label["cached_by_source"]["device"] += cached
        sources = {"local_compute": prompt - cached, "local_cache_hit": cached}
        tally.by_label["prompt_by_source"].update(sources)

    def _cached(self, life: RequestRecord) -> int:
        """Return the number of prompt tokens found in the cache when the request began."""
        return life.chunks[0].context if life.chunks else 0

    def count_end(self, life: RequestRecord) -> None:
        """Count the end of a request."""
        number, request = life.request.id, life.request
        tally = self.tallies[self._streams(number)]
        first, last = self._first.pop(number, None), self._last.pop(number, None)
        tokens = self._tokens.pop(number, 0)
        if life.refusal:
            tally.by_label["turned_away"][life.refusal.knob] += 1
            return
        if first is not None:
            self.adapters.change(request.lora, -1, self.replica.env.now)
        finished = life.outcome is Outcome.FINISHED
        reason = (
            self._reason(life, tokens)
            if finished
            else _REASONS.get(life.outcome or Outcome.LOST, "error")
        )
        tally.by_label["ended_by_reason"][reason] += 1
        tally.counts["aborted" if reason == "abort" else "ended"] += 1
        if not finished or first is None or last is None:
            return
        log = self.replica.record.steps
        begun = log.decided[life.chunks[0].row - log.dropped] if life.chunks else first
        queued = request.arrival if life.received_at is None else life.received_at
        values = {
            "e2e": last - request.arrival,
            "queue_time": begun - queued,
            "prefill_time": first - begun,
            "decode_time": last - first,
            "inference_time": last - begun,
            "tpot": (last - first) / (tokens - 1) if tokens > 1 else 0.0,
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": tokens,
            "request_computed_tokens": request.prompt_tokens - self._cached(life),
            "request_max_tokens": request.max_tokens,
            "request_preemptions": len(life.preempted_at),
            "request_n": 1,
        }
        for measure, value in values.items():
            tally.observe(measure, value)

    def count_steps(self) -> None:
        """Count the steps that ended since the last call."""
        log, now = self.replica.record.steps, self.replica.env.now
        tally, row = self.tallies[False], self._rows - log.dropped
        while row < len(log.end) and log.end[row] <= now:
            tally.observe("step_tokens", log.prefill_tokens[row] + log.decode_seqs[row])
            tally.counts["preemptions"] += log.preempted[row]
            row += 1
        self._rows = row + log.dropped

    def now(self) -> dict[str, MeasuredValue]:
        """Count the steps since the previous call and return all counters."""
        replica = self.replica
        self.count_steps()
        blocks, free = replica.scheduler.num_blocks, replica.free_blocks
        waiting = replica.num_waiting
        counts = [tally.counts for tally in self.tallies.values()]
        queried = sum(count["queried"] for count in counts)
        cached = sum(count["cached"] for count in counts)
        return {
            "running": replica.num_running,
            "waiting": waiting,
            "waiting_by_reason": {"capacity": waiting, "deferred": 0},
            "usage": (blocks - free) / blocks,
            "used_tokens": (blocks - free) * self._block_size,
            "capacity_tokens": blocks * self._block_size,
            "block_size": self._block_size,
            "hit_rate": cached / queried if queried else 0.0,
            "sleep_state": {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            **self._drafts(),
            **self._loras(),
        }

    def _drafts(self) -> dict[str, MeasuredValue]:
        """Return the counts of draft tokens."""
        counts = self.replica.record.drafting or DraftCounts()
        return {
            "drafts": counts.num_drafts,
            "draft_tokens": counts.num_draft_tokens,
            "accepted_tokens": counts.num_accepted_tokens,
            "accepted_per_pos": {str(i): count for i, count in enumerate(self.accepted)},
        }

    def _loras(self) -> dict[str, MeasuredValue]:
        """Return the adapter counts that SGLang 0.5.23 exports (``lora_pool_slots_used``)."""
        used, slots = self.adapters.decoding, self.lora_slots
        return {
            "lora_used": used,
            "lora_total": slots,
            "lora_utilization": used / slots if slots else 0.0,
        }
