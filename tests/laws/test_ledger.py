"""The wait ledger sums exactly to every request's E2E, and a leap changes nothing in it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import inf, isclose
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.outcome import Outcome
from simkv.core.scheduler import Batch
from simkv.costs.profile import Profile
from simkv.loop.record import Life, Record
from simkv.measure.metrics import e2e
from simkv.measure.simulate import run_scenario
from simkv.scenario.pacing import Pacing
from simkv.why.ledger import NEGLIGIBLE, SERVED, Interval, Kind, ledger, runs
from tests.laws.scenarios import ENGINES, run, scenarios
from tests.laws.test_laws import Watched
from tests.laws.test_leaping import COSTS, CURVED, LINEAR, record, stretched

every_engine = pytest.mark.parametrize(("engine", "variant"), ENGINES, ids=lambda name: name)


def assert_sums(life: Life, tiles: list[Interval]) -> None:
    """The intervals tile the life of a request, so that their exact sum is its length."""
    arrival, end = life.request.arrival, life.ended_at
    assert end is not None
    if end <= arrival:
        assert tiles == []
        return
    assert sum(Fraction(tile.end) - Fraction(tile.start) for tile in tiles) == (
        Fraction(end) - Fraction(arrival)
    )
    assert (tiles[0].start, tiles[-1].end) == (arrival, end)
    for a, b in pairwise(tiles):
        assert a.end == b.start
        assert a.kind is not b.kind
    assert all(tile.seconds > 0 for tile in tiles)
    if life.outcome is Outcome.FINISHED:
        assert isclose(sum(tile.seconds for tile in tiles), e2e(life) or 0.0, rel_tol=1e-9)


def assert_steps_agree(record: Record, life: Life, tiles: list[Interval]) -> None:
    """In a step that computes for a request it is served, and at no other time."""
    end, log = life.ended_at, record.steps
    assert end is not None
    steps = sum(
        max(min(log.end[row], end) - log.start[row], 0.0)
        for computed in runs(life)
        for row in range(computed.first, computed.last + 1)
    )
    served = sum(tile.seconds for tile in tiles if tile.kind in SERVED)
    if record.standstill is None:
        assert isclose(served, steps, rel_tol=1e-9, abs_tol=len(log) * NEGLIGIBLE)
    assert sum(computed.again for computed in runs(life)) == life.recomputed_tokens


@every_engine
@given(data=st.data())
def test_the_ledger_sums_to_every_life(engine: str, variant: str, data: st.DataObject) -> None:
    done = run(data.draw(scenarios(engine, variant)))
    record = done.record
    intervals = ledger(record)
    assert intervals.keys() == record.lives.keys()
    for i, life in record.lives.items():
        tiles, kinds = intervals[i], {tile.kind for tile in intervals[i]}
        assert_sums(life, tiles)
        assert_steps_agree(record, life, tiles)
        if not record.standstill:  # engines that die had taken a request and forgotten about it
            assert Kind.QUEUED not in kinds, "a scheduler did not say why somebody waits"
        if not life.preempted_at:
            assert not kinds & {Kind.PREEMPTED, Kind.RECOMPUTE}
        if not record.standstill:
            assert Kind.STALLED not in kinds
        assert_preempted_until_it_runs_again(record, life, tiles)


def assert_preempted_until_it_runs_again(
    record: Record, life: Life, tiles: Sequence[Interval]
) -> None:
    """From the loss of its KV a request is preempted, save for a step that was under way."""
    log, computed = record.steps, list(runs(life))
    for at, row in zip(life.preempted_at, life.preempted_rows, strict=True):
        before = [run for run in computed if run.first < row]
        after = next((run for run in computed if run.first >= row), None)
        start = max(at, log.end[min(before[-1].last, row - 1)]) if before else at
        end = log.decided[after.first] if after else inf
        for tile in tiles:
            if min(tile.end, end) - max(tile.start, start) > 2 * NEGLIGIBLE:
                assert tile.kind in (Kind.PREEMPTED, Kind.STALLED)


@pytest.mark.parametrize("variant", [v for e, v in ENGINES if e == "fastdeploy"])
@given(data=st.data())
def test_the_ledger_sums_in_a_pipeline_too(variant: str, data: st.DataObject) -> None:
    scenario = data.draw(scenarios("fastdeploy", variant))
    delay = st.sampled_from([0.0, 0.25, 1.5])
    pacing = Pacing(
        schedule_interval=0.25,
        queue_interval=0.25,
        put_gap=data.draw(delay),
        step_gap=data.draw(delay),
        token_processor_lag=data.draw(delay),
    )
    result = run_scenario(scenario.model_copy(update={"pipeline": pacing}), Path())
    record, intervals = result.record, result.diagnosis.ledger
    for i, life in record.lives.items():
        assert_sums(life, intervals[i])
        if not life.preempted_at:
            assert not {tile.kind for tile in intervals[i]} & {Kind.PREEMPTED, Kind.RECOMPUTE}


class Asked(Watched):
    """Checks that every decision says who heads the queue, and for whose sake it preempted."""

    def schedule(self) -> Batch:
        batch = self.scheduler.schedule()
        waiting = self.scheduler.waiting_ids()
        if not batch.fatal:
            assert (batch.held and batch.held.id) == (waiting[0] if waiting else None)
        assert len(batch.causes) == len(batch.preempted)
        return batch

    def _check(self) -> None:
        pass


@every_engine
@given(data=st.data())
def test_every_decision_names_the_head_of_the_queue(
    engine: str, variant: str, data: st.DataObject
) -> None:
    run(data.draw(scenarios(engine, variant)), Asked)


@every_engine
@given(data=st.data())
@settings(max_examples=40)
def test_a_leap_changes_nothing_in_the_ledger(
    engine: str, variant: str, data: st.DataObject
) -> None:
    scenario = data.draw(scenarios(engine, variant))
    scenario = stretched(scenario, data.draw(st.sampled_from([1, 4, 9])))
    context = data.draw(st.sampled_from([LINEAR, CURVED]))
    profile = Profile.model_validate(COSTS | {"terms": [*COSTS["terms"], context]})
    leaping, _ = record(scenario, profile, leaping=True)
    stepping, _ = record(scenario, profile, leaping=False)
    ours, theirs = ledger(leaping), ledger(stepping)
    for i, tiles in ours.items():
        assert [tile.kind for tile in tiles] == [tile.kind for tile in theirs[i]]
        for a, b in zip(tiles, theirs[i], strict=True):
            assert isclose(a.start, b.start, rel_tol=1e-9)
            assert isclose(a.end, b.end, rel_tol=1e-9)
        assert list(leaping.lives[i].causes) == stepping.lives[i].causes
