"""Tests of run records: segments, preemptions, recomputed tokens, delivered tokens."""

from __future__ import annotations

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Batch
from simkv.sim.run_record import RunRecord, emitting_rows
from simkv.sim.segments import RowSegment
from tests.fakes import Fifo, Seconds, simulate


def ask(i: int, prompt: int = 4, out: int = 4, at: float = 0.0) -> Request:
    return Request(i, prompt, out, arrival=at, output_tokens=out)


def preempted_once(call: int, fifo: Fifo) -> Batch | None:
    """Return the batch of a call: request 0 decodes until call 2, which preempts it in favor of
    request 1.

    Request 0 is prefilled again after request 1.
    """
    if call == 2:
        fifo.running = []
        batch = fifo.batch("prefill", [(1, 4)])
        batch.preempted = [0]
        fifo.waiting, fifo.running = [0], [1]
        return batch
    return None


def run_preempted() -> RunRecord:
    # request 1 arrives when call 2 decides; its four prompt tokens and one output token are
    # computed in between
    return simulate(Fifo(preempted_once), [ask(0), ask(1, at=2.0, out=1)])


def test_consecutive_decodes_form_one_segment() -> None:
    record = simulate(Fifo(), [ask(0, out=5)])
    assert record.requests[0].segments == [
        RowSegment("prefill", 0, 0, True),
        RowSegment("decode", 1, 4, True),
    ]


def test_chunked_prefill_is_one_segment() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        if call > 2:
            return None
        if call == 2:
            fifo.waiting, fifo.running = [], [0]
        return Batch(
            scheduled=[(0, 2)], context=[2 * call], emits=[0] * (call == 2), kind="prefill"
        )

    record = simulate(Fifo(decide), [ask(0, prompt=6, out=2)])
    assert record.requests[0].segments == [
        RowSegment("prefill", 0, 2, True),
        RowSegment("decode", 3, 3, True),
    ]
    assert list(emitting_rows(record.requests[0])) == [(2, 2), (3, 3)]
    assert record.requests[0].first_token == 3.0
    assert record.requests[0].recomputed_tokens == 0


def test_counts_preemption_once_and_recomputed_tokens() -> None:
    record = run_preempted()
    life = record.requests[0]
    assert life.preempted_at == [2.0]
    assert life.bounces == 0
    # 4 prompt tokens and the first output token had KV; the second output token did not yet
    assert life.recomputed_tokens == 5
    assert life.segments == [
        RowSegment("prefill", 0, 0, True),
        RowSegment("decode", 1, 1, True),
        RowSegment("prefill", 3, 3, True),
        RowSegment("decode", 4, 4, True),
    ]
    assert (life.first_token, life.last_token, life.tokens) == (1.0, 5.0, 4)


def test_step_log_counts_preemptions_and_queues() -> None:
    steps = run_preempted().steps
    assert steps.kind == ["prefill", "decode", "prefill", "prefill", "decode"]
    assert list(steps.preempted) == [0, 0, 1, 0, 0]
    assert list(steps.prefill_tokens) == [4, 0, 4, 6, 0]
    assert list(steps.decode_seqs) == [0, 1, 0, 0, 1]
    assert list(steps.waiting) == [0, 0, 1, 0, 0]
    assert list(steps.running) == [1, 1, 1, 1, 1]
    assert set(steps.free_blocks) == {100}
    assert len(steps) == 5


def test_preemption_without_kv_is_bounce() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        if call == 0:
            fifo.state = "bounced"
            return Batch(preempted=[0, 0])
        return None

    life = simulate(Fifo(decide), [ask(0)]).requests[0]
    assert (life.preempted_at, life.bounces) == ([], 2)
    assert life.recomputed_tokens == 0


def test_ignores_tokens_after_client_left() -> None:
    request = Request(0, 4, 9, output_tokens=9, timeout=3.5)
    life = simulate(Fifo(), [request]).requests[0]
    assert life.outcome is Outcome.STARVED
    assert (life.first_token, life.last_token, life.tokens) == (1.0, 3.0, 3)
    assert life.deadline == 3.5


def test_excludes_dropped_tokens() -> None:
    class Forgetful(Fifo):
        def complete(self, batch, ended):  # type: ignore[no-untyped-def]
            done = super().complete(batch, ended)
            if self.calls == 2:
                done.delivered = []
            return done

    life = simulate(Forgetful(), [ask(0, out=3)]).requests[0]
    assert (life.first_token, life.last_token, life.tokens) == (1.0, 4.0, 3)
    assert life.outcome is Outcome.FINISHED


def test_idle_time_is_no_step() -> None:
    record = simulate(Fifo(), [ask(0, out=1), ask(1, out=1, at=9.0)], executor=Seconds(0.5))
    assert list(record.steps.start) == [0.0, 9.0]
    assert list(record.steps.end) == [0.5, 9.5]
