"""Tests of the engine loop: timing, and the end of a run.

Steps take one second, idle passes 0.25 seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Batch
from simkv.metrics.run_metrics import run_verdict
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.mistralrs.spec import build
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.sim.run_record import RequestRecord, RunRecord
from tests.fakes import Fifo, Seconds, die, hang, simulate


def ask(
    i: int, at: float = 0.0, out: int = 3, timeout: float | None = None, prompt: int = 4
) -> Request:
    return Request(i, prompt, out, arrival=at, output_tokens=out, timeout=timeout)


def ends(record: RunRecord) -> list[float]:
    return list(record.steps.end)


def outcomes(record: RunRecord) -> dict[int, Outcome | None]:
    return {i: life.outcome for i, life in record.requests.items()}


def times(life: RequestRecord) -> tuple[float | None, float | None, int]:
    return life.first_token, life.last_token, life.tokens


# Timing


def test_single_request_from_arrival_to_last_token() -> None:
    record = simulate(Fifo(), [ask(0, at=0.5)])
    assert list(record.steps.start) == [0.5, 1.5, 2.5]
    assert record.steps.kind == ["prefill", "decode", "decode"]
    assert times(record.requests[0]) == (1.5, 3.5, 3)
    assert record.requests[0].outcome is Outcome.FINISHED
    assert record.requests[0].ended_at == 3.5
    assert record.idle_passes == 0


def test_arrival_at_step_end_joins_next_step() -> None:
    record = simulate(Fifo(), [ask(0), ask(1, at=1.0)])
    assert record.steps.kind == ["prefill", "prefill", "decode", "decode"]
    assert record.requests[1].first_token == 2.0


def test_arrival_during_step_waits_for_end() -> None:
    record = simulate(Fifo(), [ask(0), ask(1, at=1.5)])
    assert record.steps.kind[:3] == ["prefill", "decode", "prefill"]
    assert record.requests[1].first_token == 3.0


@pytest.mark.parametrize(("at", "first_token"), [(20.0, 21.0), (20.5, 22.0), (19.999, 21.0)])
def test_arrival_ends_leap_with_current_step(at: float, first_token: float) -> None:
    scheduler = build(MistralrsConfig(variant="pr2034"))
    record = simulate(scheduler, [ask(0, out=50), ask(1, at=at)])
    assert record.requests[1].first_token == first_token
    assert (
        len(record.steps) == 51
    )  # fifty tokens of one request, with the prefill of the other request in between


def test_simultaneous_arrivals_keep_order() -> None:
    scheduler = Fifo()
    simulate(scheduler, [ask(2, at=1.0), ask(0, at=1.0), ask(1, at=0.5)])
    assert [prompt.id for prompt in scheduler.told] == [1, 2, 0]


def test_engine_starts_when_ready() -> None:
    record = simulate(Fifo(), [ask(0), ask(1, at=0.3), ask(2, at=0.4), ask(3, at=0.5)], ready=0.4)
    assert record.steps.start[0] == 0.4
    assert record.steps.prefill_seqs[0] == 3


def test_idle_engine_sleeps_until_arrival() -> None:
    scheduler = Fifo()
    record = simulate(scheduler, [ask(0, out=1), ask(1, at=1000.0, out=1)])
    assert list(record.steps.start) == [0.0, 1000.0]
    assert record.idle_passes == 0
    assert scheduler.calls <= 4


def test_idle_passes_take_time() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        fifo.state = call  # the state changes, so this is not a deadlock
        return Batch() if call < 3 else None

    record = simulate(Fifo(decide), [ask(0, out=1)])
    assert record.idle_passes == 3
    assert list(record.steps.start) == [0.75]


def test_pipelined_engine_decides_during_previous_batch() -> None:
    class Pipelined(Fifo):
        pipeline_depth = 2

        def complete(self, batch: Batch, ended):  # type: ignore[no-untyped-def]
            self.completed_at.append(self.calls)
            return super().complete(batch, ended)

    scheduler = Pipelined()
    scheduler.completed_at = []  # type: ignore[attr-defined]
    record = simulate(scheduler, [ask(0, out=3)])
    assert scheduler.completed_at[:3] == [2, 3, 4]  # type: ignore[attr-defined]
    # consecutive passes, whether a decision was made or not
    assert ends(record)[:3] == [1.0, 2.0, 3.0]
    assert times(record.requests[0]) == (1.0, 3.0, 3)


# Client timeouts


def test_timeout_at_last_token_is_starved() -> None:
    record = simulate(Fifo(), [ask(0, out=2, timeout=2.0)])
    assert record.requests[0].outcome is Outcome.STARVED
    assert times(record.requests[0]) == (1.0, 1.0, 1)
    record = simulate(Fifo(), [ask(0, out=2, timeout=2.001)])
    assert record.requests[0].outcome is Outcome.FINISHED


def test_timeout_counts_from_arrival_and_aborts_request() -> None:
    scheduler = Fifo()
    record = simulate(scheduler, [ask(0, out=9), ask(1, at=1.5, out=9, timeout=2.0)])
    life = record.requests[1]
    assert (life.outcome, life.ended_at) == (Outcome.STARVED, 3.5)
    assert life.reason == "the client gave up"
    assert scheduler.aborted == [1]
    assert life.tokens == 1  # prefilled from 2 to 3 s; tokens after 3.5 s reached no client


def test_abort_frees_blocks() -> None:
    config = VllmConfig(block_size=4, num_gpu_blocks=5, max_model_len=16, async_scheduling=False)
    scheduler = VllmScheduler(config)
    record = simulate(scheduler, [ask(0, prompt=12, out=4, timeout=1.5), ask(1, prompt=12, out=1)])
    assert outcomes(record) == {0: Outcome.STARVED, 1: Outcome.FINISHED}
    assert record.requests[1].first_token == 3.0  # timed out at 1.5 s, noticed at 2 s
    assert scheduler.free_blocks == 4


# The horizon


@pytest.mark.parametrize(("horizon", "tokens"), [(2.5, 2), (2.0, 1), (0.5, 0)])
def test_horizon_cuts_off_later_events(horizon: float, tokens: int) -> None:
    record = simulate(Fifo(), [ask(0, out=10)], horizon=horizon)
    life = record.requests[0]
    assert (life.outcome, life.tokens, life.ended_at) == (Outcome.CUT_OFF, tokens, horizon)
    assert run_verdict(record)[0] == "cut_off"


def test_horizon_after_end_changes_nothing() -> None:
    record = simulate(Fifo(), [ask(0)], horizon=100.0)
    assert times(record.requests[0]) == (1.0, 3.0, 3)
    assert record.requests[0].ended_at == 3.0


def test_request_after_horizon_is_cut_off() -> None:
    record = simulate(Fifo(), [ask(0, out=1), ask(1, at=5.0), ask(2, at=9.0)], horizon=5.0)
    assert outcomes(record) == {0: Outcome.FINISHED, 1: Outcome.CUT_OFF, 2: Outcome.CUT_OFF}


def test_request_after_horizon_is_cut_off_after_halt() -> None:
    record = simulate(Fifo(die(0)), [ask(0), ask(1, at=9.0)], horizon=5.0)
    assert outcomes(record) == {0: Outcome.STALLED, 1: Outcome.CUT_OFF}


# Rejected and lost requests


def test_ignored_request_is_rejected() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        if call == 0:
            fifo.waiting.remove(1)
            batch = fifo.rule()
            batch.ignored = [1]
            return batch
        return None

    record = simulate(Fifo(decide), [ask(0), ask(1)])
    assert outcomes(record) == {0: Outcome.FINISHED, 1: Outcome.REJECTED}
    assert record.requests[1].ended_at == 0.0


def test_resumed_request_is_not_rejected() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        return Batch(ignored=[0]) if call == 0 else None

    record = simulate(Fifo(decide), [ask(0, out=2)])
    assert record.requests[0].outcome is Outcome.FINISHED
    assert record.requests[0].reason == ""


def test_request_dropped_from_queues_is_lost() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        if call == 1:
            fifo.running.remove(1)
            batch = fifo.rule()
            batch.lost = [1]
            return batch
        return None

    record = simulate(Fifo(decide), [ask(0), ask(1)])
    assert outcomes(record) == {0: Outcome.FINISHED, 1: Outcome.LOST}
    assert run_verdict(record)[0] == "lost"


def test_request_that_vanishes_is_lost() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        if call == 1:
            fifo.running.remove(1)
        return None

    record = simulate(Fifo(decide), [ask(0), ask(1)])
    assert outcomes(record) == {0: Outcome.FINISHED, 1: Outcome.LOST}


# Engine death and halts


def test_engine_death_stalls_all_requests() -> None:
    scheduler = Fifo(die(2))
    record = simulate(scheduler, [ask(0, out=9), ask(1, out=2), ask(2, at=50.0)])
    assert outcomes(record) == {0: Outcome.STALLED, 1: Outcome.FINISHED, 2: Outcome.STALLED}
    # the third request arrived at a dead engine
    assert [prompt.id for prompt in scheduler.told] == [0, 1]
    assert times(record.requests[0]) == (
        1.0,
        2.0,
        2,
    )  # the batch that crashed the engine emitted no token
    assert len(record.steps) == 2
    assert run_verdict(record) == ("engine died", "at 2.000 s: panic: test")


def test_endless_schedule_call_is_livelock() -> None:
    record = simulate(Fifo(hang(1)), [ask(0, out=2)])
    assert outcomes(record) == {0: Outcome.STALLED}
    assert record.engine_halt is not None
    assert record.engine_halt.requests == [0]
    assert run_verdict(record)[0] == "livelock"


@pytest.mark.parametrize("end", [die, hang])
def test_timeout_before_engine_death_is_starved(
    end: Callable[[int], Callable[[int, Fifo], Batch | None]],
) -> None:
    requests = [ask(0, out=9, timeout=2.5), ask(1, out=9, timeout=3.0), ask(2, out=9, timeout=8.0)]
    record = simulate(Fifo(end(3)), requests)  # at 3 s
    assert outcomes(record) == {0: Outcome.STARVED, 1: Outcome.STALLED, 2: Outcome.STALLED}


def test_requests_that_cannot_run_are_deadlock() -> None:
    scheduler = build(MistralrsConfig(variant="seed", max_num_seqs=1))  # never admits a request
    record = simulate(scheduler, [ask(0), ask(1, at=30.0)])
    assert outcomes(record) == {0: Outcome.STALLED, 1: Outcome.STALLED}
    assert run_verdict(record)[0] == "deadlock"
    assert len(record.steps) == 0
    assert record.idle_passes < 10


def test_timeout_during_deadlock_is_stalled() -> None:
    scheduler = build(MistralrsConfig(variant="seed", max_num_seqs=1))
    record = simulate(scheduler, [ask(0, timeout=20.0), ask(1, at=0.1, timeout=40.0)])
    assert outcomes(record) == {0: Outcome.STALLED, 1: Outcome.STALLED}
    assert record.engine_halt is not None
    assert record.engine_halt.since < 20.0
    assert run_verdict(record)[0] == "deadlock"


def test_halt_resolved_by_arrival_is_no_deadlock() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        return Batch() if len(fifo.waiting) == 1 else None  # waits for another request

    record = simulate(Fifo(decide), [ask(0, out=1), ask(1, at=30.0, out=1)])
    assert outcomes(record) == {0: Outcome.FINISHED, 1: Outcome.FINISHED}
    assert record.engine_halt is None
    assert record.requests[0].first_token == 31.0


@pytest.mark.parametrize("period", [1, 3, 7])
def test_repeated_work_without_token_is_livelock(period: int) -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        fifo.state = call % period
        return fifo.batch("prefill", [(0, 1)], emits=False)

    scheduler = Fifo(decide)
    record = simulate(scheduler, [ask(0)])
    assert run_verdict(record)[0] == "livelock"
    assert scheduler.calls < 300


def test_finite_work_without_token_is_no_livelock() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        fifo.state = call  # a long prompt, computed in chunks
        return fifo.batch("prefill", [(0, 1)], emits=False) if call < 500 else None

    record = simulate(Fifo(decide), [ask(0, out=1)])
    assert record.requests[0].first_token == 501.0


# Other tests


def test_reports_every_request_once() -> None:
    reported: list[int] = []
    requests = [ask(0), ask(1, timeout=1.5), ask(2, at=2.0)]
    simulate(Fifo(), requests, resolved=lambda: reported.append(1))
    assert len(reported) == 3


def test_executor_receives_step_load() -> None:
    executor = Seconds()
    simulate(Fifo(), [ask(0, prompt=4, out=2), ask(1, prompt=6, out=3)], executor=executor)
    assert [load[:6] for load in executor.loads] == [
        (2, 10, 0, 0, 0, 10 + 21),  # pairs of a query and a key: 1 + 2 + … + 4, and up to 6
        (0, 0, 0, 2, 4 + 6, 0),
        (0, 0, 0, 1, 7, 0),
    ]


def test_run_without_requests() -> None:
    record = simulate(Fifo(), [])
    assert record.requests == {}
    assert run_verdict(record) == ("served", "every request finished")
