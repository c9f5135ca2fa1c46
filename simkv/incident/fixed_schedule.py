"""The batches of one simulation, whose durations are computed again with other step costs.

The prefill and decode time of a request is a sum over steps. A fit can therefore try other step
costs without another simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simkv.costs.sources.single_request import ModelTraits
from simkv.costs.sources.single_request_fit import MIXED_DECODE_FACTOR
from simkv.explain.computed_runs import compute_runs
from simkv.explain.ledger_kinds import LedgerKind
from simkv.incident.incident_simulation import rank_records
from simkv.incident.step_costs import UnitCosts, seconds_without_attention
from simkv.sim.simulation import ScenarioRun

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FixedSchedule:
    """The contents of each step, and the range of steps of each request.

    ``first`` is the step in which a request is first scheduled. ``token`` is the step of its first
    token, and ``last`` is its last step. A step is -1 if the request did not get that far. ``came``
    is the step in progress at its arrival, and ``left`` is the fraction of this step after the
    arrival. ``slowed`` is the factor on step durations from waiting for other data-parallel ranks
    in lockstep.
    """

    prefill_tokens: Floats
    decode_seqs: Floats
    context: Floats
    pairs: Floats
    prefills: npt.NDArray[np.bool_]
    first: Ints
    token: Ints
    last: Ints
    came: Ints
    left: Floats
    shape: ModelTraits | None = None
    slowed: Floats | float = 1.0

    @staticmethod
    def of(
        made: ScenarioRun, count: int, prices: UnitCosts, shape: ModelTraits | None = None
    ) -> FixedSchedule:
        """Return the schedule of a run of ``count`` requests with ids from 0 to ``count`` - 1.

        ``prices`` contains the step costs of the run.
        """
        record = made.record
        log = record.steps
        steps = len(log)
        context, pairs = np.zeros(steps), np.zeros(steps)
        starts, ends = np.asarray(log.start), np.asarray(log.end)
        ranks = np.concatenate([[0], np.cumsum([len(part.steps) for part in rank_records(made)])])
        rows = np.full((4, count), -1, np.int64)
        left = np.ones(count)
        for i, life in record.requests.items():
            emitted = -1
            for run in compute_runs(life):
                many = run.last - run.first + 1
                here = slice(run.first, run.last + 1)
                if run.kind is LedgerKind.DECODE:
                    context[here] += run.context + np.arange(many)
                else:
                    pairs[run.first] += run.tokens * (run.context + (run.tokens + 1) / 2)
            for segment in life.segments:
                if segment.emits and emitted < 0:
                    emitted = segment.last if segment.kind == "prefill" else segment.first
            if life.segments:
                rows[0, i] = life.segments[0].first
                rows[1, i] = emitted
                rows[2, i] = life.segments[-1].last
            rank = int(np.searchsorted(ranks, max(rows[0, i], 0), "right")) - 1
            low, high = ranks[rank : rank + 2].tolist()
            came = low + int(np.searchsorted(ends[low:high], life.request.arrival, "right"))
            rows[3, i] = min(came, high - 1)
            if came < high and starts[came] < life.request.arrival:
                left[i] = (ends[came] - life.request.arrival) / (ends[came] - starts[came])
        found = FixedSchedule(
            np.asarray(log.prefill_tokens, np.float64),
            np.asarray(log.decode_seqs, np.float64),
            context,
            pairs,
            np.asarray(log.prefill_seqs) > 0,
            rows[0],
            rows[1],
            rows[2],
            rows[3],
            left,
            shape,
        )
        if made.fleet is None or not made.fleet.rules.lockstep:
            return found
        alone = np.maximum(found.steps(prices), 1e-9)
        return replace(found, slowed=(ends - starts) / alone)

    def steps(self, prices: UnitCosts) -> Floats:
        """Return the duration in seconds of each step at the given step costs."""
        cost = seconds_without_attention(self.prefill_tokens, self.decode_seqs, prices, self.shape)
        beside = np.where(self.prefills, MIXED_DECODE_FACTOR, 1.0) * prices.context * self.context
        return np.asarray((cost + prices.pair * self.pairs + beside) * self.slowed)

    def spans(self, prices: UnitCosts) -> tuple[Floats, Floats, Floats]:
        """Return the prefill time, decode time and TTFT of each request in seconds.

        A value is NaN if the request did not get that far.
        """
        cost = self.steps(prices)
        total = np.concatenate([[0.0], np.cumsum(cost)])
        begun, answered = self.first >= 0, (self.first >= 0) & (self.token >= 0)
        prefill = np.where(answered, total[self.token + 1] - total[self.first], np.nan)
        decode = np.where(answered, total[self.last + 1] - total[self.token + 1], np.nan)
        waited = total[self.first] - total[self.came + 1] + self.left * cost[self.came]
        same = self.came >= self.first  # the request arrived while the engine was idle
        until = np.where(begun, np.where(same, 0.0, waited), np.nan) + prefill
        return prefill, decode, until
