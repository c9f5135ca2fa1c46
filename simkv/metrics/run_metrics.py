"""Compute the metrics of a run from its record, as ``vllm bench serve`` defines them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simkv.core.figure_registry import STATISTICS
from simkv.core.grouped_quantile import quantile
from simkv.core.outcome import FAILURES, Outcome
from simkv.explain.verdicts.verdict import name_requests
from simkv.metrics.censored_latency import compute_censored_latency
from simkv.sim.run_record import (
    DraftCounts,
    KvCopyCounts,
    RequestRecord,
    RunRecord,
    emitting_rows,
)
from simkv.sim.segments import WIDTH, read_chunks

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Samples:
    """Weighted samples: ``values`` in seconds, with the number ``weights`` of each value."""

    values: Floats
    weights: npt.NDArray[np.int64]

    def statistics_ms(self) -> dict[str, float]:
        """Return mean, median, P90, P95 and P99 by name, in milliseconds; 0 without samples.

        Percentiles are interpolated linearly between samples, as in numpy.
        """
        return {name: 1000.0 * value for name, value in self._statistics().items()}

    def _statistics(self) -> dict[str, float]:
        total = int(self.weights.sum())
        if not total:
            return dict.fromkeys(STATISTICS, 0.0)
        order = np.argsort(self.values, kind="stable")
        values, ends = self.values[order].tolist(), np.cumsum(self.weights[order]).tolist()
        shares = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
        result = {"mean": math.fsum(self.values * self.weights) / total}
        result |= {name: quantile(values, ends, share) for name, share in shares.items()}
        return result


def _plain(values: Iterable[float]) -> Samples:
    array = np.fromiter(values, dtype=np.float64)
    return Samples(array, np.ones(len(array), dtype=np.int64))


def ttft(life: RequestRecord) -> float | None:
    """Return the seconds from arrival to the first token, or None if there is no token."""
    return None if life.first_token is None else life.first_token - life.request.arrival


def e2e(life: RequestRecord) -> float | None:
    """Return the seconds from arrival to the last token, or None if the request did not finish."""
    if life.outcome is not Outcome.FINISHED or life.last_token is None:
        return None
    return life.last_token - life.request.arrival


def tpot(life: RequestRecord) -> float | None:
    """Return the mean seconds per output token after the first (TPOT), or None.

    Unfinished requests and requests with one output token have no TPOT.
    """
    if life.outcome is not Outcome.FINISHED or life.tokens < 2:
        return None
    assert life.first_token is not None
    assert life.last_token is not None
    return (life.last_token - life.first_token) / (life.tokens - 1)


def token_rows(life: RequestRecord) -> list[tuple[int, int]]:
    """Return the steps that emitted a token of the request, as ranges (first, last) of row
    numbers.
    """
    ranges: list[tuple[int, int]] = []
    left = life.tokens - life.accepted_tokens
    for first, last in emitting_rows(life):
        if not left:
            break
        last = min(last, first + left - 1)
        left -= last - first + 1
        ranges.append((first, last))
    return ranges


def message_rows(life: RequestRecord) -> npt.NDArray[np.int64]:
    """Return the steps that sent a message to the client, as row numbers of the step log.

    A client receives the first token, then every ``life.tokens_per_chunk``-th token, and the last
    token.
    """
    ranges = [np.arange(first, last + 1) for first, last in token_rows(life)]
    rows = np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int64)
    places = np.unique(
        np.append(np.arange(0, len(rows), life.tokens_per_chunk), max(len(rows) - 1, 0))
    )
    found: npt.NDArray[np.int64] = rows[places[: len(rows)]]
    return found


def token_gaps(record: RunRecord, lives: Iterable[RequestRecord]) -> Samples:
    """Return the times between successive token messages of each request, as one set of samples.

    Equal gaps of several requests are stored once, with the number of requests as the weight.
    """
    ends = np.asarray(record.token_times, dtype=np.float64)
    change = np.zeros(len(ends) + 1, dtype=np.int64)
    across: list[float] = []
    for life in lives:
        previous: int | None = None
        if life.tokens_per_chunk > 1:
            across += np.diff(ends[message_rows(life)]).tolist()
            continue
        for first, last in token_rows(life):
            if previous is not None:
                across.append(ends[first] - ends[previous])
            change[first + 1] += 1
            change[last + 1] -= 1
            previous = last
    weights = np.cumsum(change)[1:-1] if len(ends) > 1 else np.zeros(0, dtype=np.int64)
    used = weights > 0
    within = np.diff(ends)[used] if len(ends) > 1 else np.zeros(0)
    return Samples(
        np.concatenate([within, np.asarray(across, dtype=np.float64)]),
        np.concatenate([weights[used], np.ones(len(across), dtype=np.int64)]),
    )


def longest_stall(record: RunRecord) -> float:
    """Return the longest time (s) between two token messages of a request, or 0 if there are
    none.
    """
    samples = token_gaps(record, record.requests.values())
    return float(samples.values.max()) if len(samples.values) else 0.0


def jain_index(values: Floats) -> float:
    """Return Jain's fairness index, ``(sum x)^2 / (n sum x^2)``.

    The index is 1 for equal values, and 0 if all values are 0.
    """
    if not len(values) or not values.any():
        return 0.0
    return math.fsum(values) ** 2 / (len(values) * math.fsum(np.square(values)))


def normalized_speeds(record: RunRecord) -> Floats:
    """Return the duration in isolation divided by the E2E latency, for each request.

    The value is 0 for an unfinished request.
    """
    return np.asarray(
        [
            record.isolated_s.get(i, 0.0) / seconds if (seconds := e2e(life)) else 0.0
            for i, life in record.requests.items()
        ]
    )


def compute_slowdown(record: RunRecord) -> float:
    """Return the total time of all requests relative to their total time in isolation.

    Requests without a token do not count. Returns 1 without requests.
    """
    both = [
        (life.last_token - life.request.arrival, record.isolated_s[i])
        for i, life in record.requests.items()
        if life.last_token is not None and record.isolated_s.get(i)
    ]
    return sum(took for took, _ in both) / (sum(alone for _, alone in both) or 1.0) if both else 1.0


def summarize(record: RunRecord) -> dict[str, Any]:
    """Return the metrics of a run, as in ``summary.json``."""
    lives = list(record.requests.values())
    count = {outcome: sum(life.outcome is outcome for life in lives) for outcome in Outcome}
    finished = [life for life in lives if life.outcome is Outcome.FINISHED]
    latencies = [seconds for life in finished if (seconds := e2e(life)) is not None]
    seconds = makespan(lives)
    ending, detail = run_verdict(record)
    return {
        "requests": len(lives),
        **{outcome.value: count[outcome] for outcome in Outcome},
        "verdict": ending,
        "verdict_detail": detail,
        "makespan_s": seconds,
        "request_throughput": _rate(len(finished), seconds),
        "output_throughput": _rate(sum(life.tokens for life in finished), seconds),
        "total_token_throughput": _rate(
            sum(life.tokens + life.request.prompt_tokens for life in finished), seconds
        ),
        "total_input_tokens": sum(life.request.prompt_tokens for life in finished),
        "total_output_tokens": sum(life.tokens for life in finished),
        "preemptions": sum(len(life.preempted_at) for life in lives),
        "bounces": sum(life.bounces for life in lives),
        "recomputed_tokens": sum(life.recomputed_tokens for life in lives),
        "longest_stall_s": longest_stall(record),
        "jain_index": jain_index(normalized_speeds(record)),
        "fastest_e2e_s": min(latencies, default=0.0),
        "slowest_e2e_s": max(latencies, default=0.0),
        "ttft_ms": _plain(s for x in finished if (s := ttft(x)) is not None).statistics_ms(),
        "tpot_ms": _plain(s for x in finished if (s := tpot(x)) is not None).statistics_ms(),
        "itl_ms": token_gaps(record, finished).statistics_ms(),
        "e2e_ms": _plain(latencies).statistics_ms(),
        "ttft_all_ms": compute_censored_latency(lives, ttft).figures_ms(),
        "e2e_all_ms": compute_censored_latency(lives, e2e).figures_ms(),
        "steps": len(record.steps),
        "idle_passes": record.idle_passes,
        "prefix_cache": _prefix_cache(lives),
        **({} if record.drafting is None else {"spec_decode": _drafting(record.drafting)}),
        **({} if record.copied is None else {"kv_tiers": _tiers(lives, record.copied)}),
    }


def prefix_hits(lives: Iterable[RequestRecord]) -> tuple[int, int]:
    """Return the number of prompt tokens that requests found in the cache, and of all prompt
    tokens.

    Only the first admission of each request counts.
    """
    hits = queried = 0
    for life in lives:
        if life.chunk_rows:
            hits += read_chunks(life.chunk_rows[:WIDTH])[0].context
            queried += life.request.prompt_tokens
    return hits, queried


def _prefix_cache(lives: Iterable[RequestRecord]) -> dict[str, float]:
    """Return the hit rate (%) of the prefix cache over all memory tiers."""
    hits, queried = prefix_hits(lives)
    return {
        "hit_rate": 100.0 * hits / queried if queried else 0.0,
        "hit_tokens": hits,
        "queried_tokens": queried,
    }


def _tiers(lives: Iterable[RequestRecord], copied: KvCopyCounts) -> dict[str, float]:
    """Return the hit rate (%) of each memory tier, and the numbers of tokens copied between
    tiers.
    """
    taken_in = [life for life in lives if life.chunk_rows]
    tokens = sum(life.request.prompt_tokens for life in taken_in)
    # The last token of a fully cached prompt is recomputed; it reduces the GPU's share.
    loaded = sum(min(life.loaded_tokens, life.chunks[0].context) for life in taken_in)
    hits = sum(life.chunks[0].context for life in taken_in) - loaded
    read = sum(
        min(life.disk_tokens, life.loaded_tokens, life.chunks[0].context) for life in taken_in
    )
    figures = {
        "gpu_hit_rate": 100.0 * hits / tokens if tokens else 0.0,
        "host_hit_rate": 100.0 * (loaded - read) / tokens if tokens else 0.0,
        "loaded_tokens": copied.loaded_tokens,
        "stored_tokens": copied.stored_tokens,
    }
    if copied.read_tokens is not None and copied.written_tokens is not None:
        figures["disk_hit_rate"] = 100.0 * read / tokens if tokens else 0.0
        figures["read_tokens"] = copied.read_tokens
        figures["written_tokens"] = copied.written_tokens
    return figures


def _drafting(counts: DraftCounts) -> dict[str, float]:
    """Return the metrics of draft acceptance, named as in ``vllm bench serve`` (0.33.0)."""
    drafts, tokens = counts.num_drafts, counts.num_draft_tokens
    accepted = counts.num_accepted_tokens
    return {
        "acceptance_rate": 100.0 * accepted / tokens if tokens else 0.0,
        "acceptance_length": 1.0 + accepted / drafts if drafts else 0.0,
        "num_drafts": drafts,
        "draft_tokens": tokens,
        "accepted_tokens": accepted,
    }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def makespan(lives: list[RequestRecord]) -> float:
    """Return the seconds from the first arrival until every request has ended."""
    if not lives:
        return 0.0
    first = min(life.request.arrival for life in lives)
    last = max(first if life.ended_at is None else life.ended_at for life in lives)
    return max(last - first, 0.0)


def run_verdict(record: RunRecord) -> tuple[str, str]:
    """Return the most severe verdict on the run, and a sentence with details."""
    stop = record.engine_halt
    by_outcome = {
        outcome: [life for life in record.requests.values() if life.outcome is outcome]
        for outcome in Outcome
    }
    if stop and by_outcome[Outcome.STALLED]:
        return stop.kind, f"at {stop.since:.3f} s: {stop.why}"
    for outcome in FAILURES[1:]:
        if lives := by_outcome[outcome]:
            named = name_requests([life.request.id for life in lives])
            return outcome.value, f"{len(lives)} of {len(record.requests)}: {named}"
    if by_outcome[Outcome.CANCELLED]:
        return "served", "every request finished or was cancelled by its client"
    return "served", "every request finished"


def request_rows(
    variant: str, record: RunRecord, replicas: Mapping[int, str] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of ``requests.csv``, one per request, with times in seconds.

    ``output_tokens`` is the requested output length. Latencies other than ``ttft_s`` are None for
    unfinished requests. ``replicas`` contains the names of the replicas by request id.
    """
    return [
        {
            "variant": variant,
            "id": life.request.id,
            "arrival_s": life.request.arrival,
            "prompt_tokens": life.request.prompt_tokens,
            "output_tokens": life.request.output_tokens,
            "outcome": str(life.outcome),
            "first_token_s": life.first_token,
            "finish_s": life.last_token if life.outcome is Outcome.FINISHED else None,
            "ttft_s": ttft(life),
            "tpot_s": tpot(life),
            "e2e_s": e2e(life),
            "preemptions": len(life.preempted_at),
            "recomputed_tokens": life.recomputed_tokens,
            **({} if replicas is None else {"replica": replicas.get(i)}),
        }
        for i, life in sorted(record.requests.items())
    ]


def step_rows(variant: str, record: RunRecord) -> list[dict[str, Any]]:
    """Return the rows of ``steps.csv``, one per step.

    The numbers of requests and of free blocks are taken after scheduling.
    """
    log = record.steps
    columns = zip(
        log.start,
        log.end,
        log.kind,
        log.prefill_seqs,
        log.prefill_tokens,
        log.decode_seqs,
        log.preempted,
        log.waiting,
        log.running,
        log.free_blocks,
        strict=True,
    )
    names = (
        "start_s",
        "end_s",
        "kind",
        "prefill_seqs",
        "prefill_tokens",
        "decode_seqs",
        "preempted",
        "waiting",
        "running",
        "free_blocks",
    )
    return [
        {"variant": variant, "step": step, **dict(zip(names, row, strict=True))}
        for step, row in enumerate(columns)
    ]
