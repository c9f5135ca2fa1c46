"""Tests of FastDeploy's three threads: the decisions of a plain loop, detected hangs, and complete
runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simkv.conformance.tick_replay import one_step_per_tick, replay_ticks
from simkv.core.actor_protocol import Message, MessageEffects, WorkerCrash
from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.core.request import Prompt, Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.metrics.run_metrics import request_rows, step_rows, summarize
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file, run_scenario
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.scenario.thread_pacing import Pacing
from simkv.schedulers.fastdeploy.config import FastDeployConfig, VariantName
from simkv.schedulers.fastdeploy.resource_manager import PlannedTask
from simkv.schedulers.fastdeploy.scheduler import FastDeployScheduler, build_actors
from simkv.schedulers.fastdeploy.spec import FASTDEPLOY
from simkv.sim.actor_pipeline import AsyncPipeline, pipeline_notes
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from tests.laws.random_scenarios import KNOBS, scenarios

VARIANTS = get_args(VariantName)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


class Watched(AsyncPipeline):
    """A pipeline that records its decision times and checks its blocks at every step."""

    calls: list[float]

    def decide(self) -> list[PlannedTask]:
        self.calls = [*getattr(self, "calls", ()), self.env.now]
        planned = super().decide()
        self.check()
        return planned

    def receive(self, message: Message) -> MessageEffects:
        heard = super().receive(message)
        self.check()
        return heard

    def check(self) -> None:
        self.manager.pool.check()
        held = sum(self.manager.pool.held(seq.id) for seq in self.manager.alive())
        assert held + self.manager.pool.free == self.manager.pool.num_blocks


def pipeline(config: FastDeployConfig, pacing: Pacing, kind: type[AsyncPipeline] = Watched) -> Any:
    executor = SimulatedExecutor(load_profile("unit-step"))
    return kind(simpy.Environment(), FastDeployScheduler(config), executor, pacing)


def requests(*sizes: tuple[int, int], at: float = 0.0) -> list[Request]:
    """Return requests with these numbers of prompt and output tokens; all arrive at the same
    time.
    """
    return [Request(i, p, o, arrival=at, output_tokens=o) for i, (p, o) in enumerate(sizes)]


# Equal decisions


def plain_loop(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the three actors in a loop without a clock, each once per tick, until a crash."""
    config = FastDeployConfig(variant=header["variant"], **header["config"])
    manager, worker, processor = build_actors(config)
    outputs = {request["id"]: request["output_tokens"] for request in header["requests"]}
    lag, gap = header["delays"]["tp_lag"], header["delays"][GAP]
    on_the_way: deque[tuple[int, Message]] = deque()

    def hear(tick: int) -> list[int]:
        heard = []
        while on_the_way and on_the_way[0][0] + 1 + lag <= tick:
            sent, message = on_the_way.popleft()
            processor.receive(message)
            heard.append(sent)
        return heard

    for tick in range(80):
        delivered = [[sent, "pre"] for sent in hear(tick)]
        to_come = [r for r in header["requests"] if r["arrival_step"] >= tick]
        if not to_come and not manager.alive():
            return
        for r in to_come:
            if r["arrival_step"] == tick:
                manager.add(Prompt(r["id"], r["prompt_tokens"], r["max_tokens"]))
        tasks: list[Any] = []
        if planned := manager.schedule():
            delivered += [[sent, "gap"] for sent in (hear(tick + 1) if gap else ())]
            parcel = manager.put(planned)
            tasks = [[task.kind, task.id] for task in parcel.tasks]
            try:
                worker.take(parcel)
            except WorkerCrash:
                yield {"ending": "raised"}
                return
        stalled = worker.stalled()
        message = worker.step(lambda i, k: k >= outputs[i])
        if message is not None:
            on_the_way.append((tick, message))
        yield {
            "delivered": delivered,
            "tasks": tasks,
            "stalled": stalled,
            "silent": message is None,
            "waiting": [seq.id for seq in manager.waiting],
            "running": [seq.id for seq in manager.running],
            "tokens": {str(s.id): [s.computed, s.need, s.total] for s in manager.alive()},
            "free_blocks": manager.pool.free,
        }


GAP, IDLE = "messages_processed_between_schedule_and_put", "idle_worker_sends_ack"


@st.composite
def headers(draw: Any) -> dict[str, Any]:
    """Return the header of a trace of ticks, for any variant."""
    variant = draw(st.sampled_from(VARIANTS) | st.sampled_from(VARIANTS[-2:]))
    config = KNOBS["fastdeploy"](draw, variant)
    delays = {"tp_lag": draw(st.integers(0, 6)), GAP: draw(st.integers(0, 1))}
    delays[IDLE] = config.pop(IDLE)
    workload = []
    for i in range(draw(st.integers(1, 6))):
        output = draw(st.integers(1, 16))
        workload.append(
            {
                "id": i,
                "arrival_step": draw(st.integers(0, 8)),
                "prompt_tokens": draw(st.integers(1, 30)),
                "output_tokens": output,
                "max_tokens": output + draw(st.integers(0, 4)),
            }
        )
    return {"variant": variant, "config": config, "requests": workload, "delays": delays}


@given(header=headers())
def test_processes_match_plain_loop(header: dict[str, Any]) -> None:
    acks = header["delays"][IDLE]
    expected = list(plain_loop({**header, "config": header["config"] | {IDLE: acks}}))
    ours = list(islice(replay_ticks(FASTDEPLOY, header, 80), len(expected)))
    for line in ours:
        if "tick" in line:
            line["tasks"] = [task[:2] for task in line["tasks"]]
            line["silent"] = line["emitted"] is None
    # the scheduler sends the same block tables repeatedly
    if header["variant"].startswith("ratio"):
        for line in (*expected, *ours):
            line["tasks"] = [task for task in line.get("tasks", ()) if task[0] != "decode"]
    assert [{key: line.get(key) for key in e} for e, line in zip(expected, ours, strict=True)] == (
        expected
    )


@every_variant
@given(data=st.data())
def test_pipeline_without_lag_matches_engine(variant: VariantName, data: st.DataObject) -> None:
    knobs = KNOBS["fastdeploy"](data.draw, variant) | {IDLE: True}
    config = FastDeployConfig(variant=variant, **knobs)
    # With later arrivals, one variant would already be halted in a cycle while the other still
    # runs.
    sizes = st.tuples(st.integers(0, 1), st.integers(1, 30), st.integers(1, 16))
    workload = [
        Request(i, prompt, output, arrival=float(arrival), output_tokens=output)
        for i, (arrival, prompt, output) in enumerate(data.draw(st.lists(sizes, min_size=1)))
    ]
    executor = SimulatedExecutor(load_profile("unit-step"))
    lockstep = run_clients(
        Engine(simpy.Environment(), FastDeployScheduler(config), executor), workload, 2000.0
    )
    threads = run_clients(pipeline(config, one_step_per_tick(0, gap=False)), workload, 2000.0)
    assert bool(threads.engine_halt) == bool(lockstep.engine_halt)
    rounds = bool(lockstep.engine_halt)  # the number of repetitions before the detection may differ
    for mine, other in zip(request_rows("", threads), request_rows("", lockstep), strict=True):
        for count in ("preemptions", "recomputed_tokens") if rounds else ():
            del mine[count], other[count]
        assert mine == other
    for mine, other in zip(step_rows("", threads), step_rows("", lockstep), strict=not rounds):
        # A preemption that leaves no work is part of the next row in one record, and of no row in
        # the other record.
        del mine["preempted"], other["preempted"]
        assert mine == other


# Pull request 5796


@pytest.fixture(scope="module")
def incident(root: Path) -> dict[str, RunResult]:
    return run_file(root / "scenarios" / "fastdeploy-5796.yaml")


@pytest.mark.parametrize(
    ("variant", "tokens", "since"),
    [
        ("minus1", "11 vs 12", 8.0),
        ("minus1-own-loop", "11 vs 12", 6.5),
        ("minus1-default-reserve", "16 vs 17", 11.0),
    ],
)
def test_ambiguous_token_id_hangs_slot(
    incident: dict[str, RunResult], variant: str, tokens: str, since: float
) -> None:
    record, figures = incident[variant].record, incident[variant].summary
    assert [life.outcome for life in record.requests.values()] == [
        Outcome.FINISHED,
        Outcome.STALLED,
    ]
    assert record.engine_halt is not None
    assert record.engine_halt.requests == [1]
    assert record.engine_halt.since == pytest.approx(since, abs=0.01)
    assert figures["verdict"] == "deadlock"
    assert record.requests[1].reason == (
        "deadlock: slot 1: the worker waits for a prefill chunk, but the scheduler treats "
        f"request 1 as decoding; they differ by one token ({tokens})"
    )


@pytest.mark.parametrize("variant", ["sentinel", "sentinel-own-loop", "sentinel-default-reserve"])
def test_distinct_token_id_does_not_hang_slot(incident: dict[str, RunResult], variant: str) -> None:
    result = incident[variant]
    assert result.summary["verdict"] == "served"
    assert result.summary["preemptions"] == 1
    assert not result.notes


def test_later_preemption_duplicates_token(incident: dict[str, RunResult]) -> None:
    late = incident["minus1-one-step-later"]
    assert late.summary["verdict"] == "served"
    assert late.record.requests[1].tokens == 3
    assert any("request 1 received 3 tokens, but the model emits 2" in x for x in late.notes)


def test_hang_is_detected_beside_active_requests(root: Path) -> None:
    path = root / "scenarios" / "fastdeploy-5796.yaml"
    late = "{arrival: 100, prompt_tokens: 4, output_tokens: 2}"
    patient = "{prompt_tokens: 11, output_tokens: 2, timeout: 50}"
    workload = f"workload.requests=[{{prompt_tokens: 6, output_tokens: 4}}, {patient}, {late}]"
    result = run_scenario(load(path, [workload])["minus1"], path.parent)
    outcomes = [life.outcome for life in result.record.requests.values()]
    assert outcomes == [Outcome.FINISHED, Outcome.STARVED, Outcome.FINISHED]
    assert any("they differ by one token (11 vs 12)" in note for note in result.notes)


def test_only_fastdeploy_supports_pipeline(root: Path) -> None:
    path = root / "scenarios" / "mistralrs-six.yaml"
    with pytest.raises(
        InputError, match=r"pipeline.*engine mistralrs has no asynchronous pipeline"
    ):
        load(path, ["pipeline.put_gap=0.1"])
    with pytest.raises(InputError, match=r"pipeline\.schedule_interval"):
        load(root / "scenarios" / "fastdeploy-5796.yaml", ["pipeline.schedule_interval=0"])


# The clock

ROOMY = FastDeployConfig(
    block_size=16,
    num_blocks=100,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prealloc_dec_block_slot_num_threshold=0,  # no tasks for decodes
)


def test_engine_polls_at_intervals() -> None:
    run = pipeline(ROOMY, Pacing(schedule_interval=0.25, queue_interval=0.5))
    run_clients(run, requests((5, 3), at=0.6), None)
    # From 0 s, the scheduler polls every 0.25 s until the arrival. The worker takes the tasks of
    # 0.75 s immediately, and the scheduler notices this 0.5 s later. Tokens arrive at 1.75, 2.75
    # and 3.75 s. The call at 2.75 s records that the request decodes, so the call at 3.0 s differs
    # and is not skipped.
    assert run.calls == [0.0, 0.75, 1.25, 1.75, 2.75, 3.0, 3.75]


def test_tasks_wait_for_step_border() -> None:
    pacing = Pacing(schedule_interval=0.25, queue_interval=0.25, step_gap=0.5)
    run = pipeline(ROOMY, pacing)
    late = Request(1, 5, 1, arrival=0.3, output_tokens=1)
    record = run_clients(run, [*requests((5, 2)), late], None)
    # The step of request 0 ends at 1 s, and the next step starts at 1.5 s; request 1 was put at 0.5
    # s.
    assert [row["start_s"] for row in step_rows("", record)] == [0.0, 1.5]
    assert [row["prefill_seqs"] for row in step_rows("", record)] == [1, 1]
    assert 0.5 in run.calls
    assert not [time for time in run.calls if 0.5 < time < 1.5]


def test_tokens_arrive_after_processor_lag() -> None:
    record = run_clients(pipeline(ROOMY, Pacing(token_processor_lag=2.5)), requests((5, 3)), None)
    life = record.requests[0]
    assert (life.first_token, life.last_token, life.tokens) == (3.5, 5.5, 3)


def test_limits_new_requests_per_call() -> None:
    class Waiting(Watched):
        most = 0

        def decide(self) -> list[PlannedTask]:
            self.most = max(self.most, len(self.manager.waiting))
            return super().decide()

    for limit, most in ((3, 3), (None, 9), (9, 4)):  # four slots
        run = pipeline(ROOMY, Pacing(max_prefill_num=limit), Waiting)
        assert summarize(run_clients(run, requests(*[(5, 3)] * 9), None))["finished"] == 9
        assert run.most == most
    # limit of one request at a time; no request is pulled while another waits
    tight = replace(ROOMY, num_blocks=2)
    run = pipeline(tight, Pacing(max_prefill_num=2), Waiting)
    assert summarize(run_clients(run, requests(*[(20, 3)] * 5), None))["finished"] == 5
    assert run.most == 2


# Every run ends

PACINGS = st.builds(
    Pacing,
    schedule_interval=st.sampled_from([0.005, 0.1, 1.0]),
    queue_interval=st.sampled_from([0.001, 0.1, 1.0]),
    put_gap=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    step_gap=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    token_processor_lag=st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.5, 6.0]),
    max_prefill_num=st.sampled_from([None, 1, 3]),
)


@every_variant
@given(data=st.data())
def test_every_run_ends_with_one_outcome_per_request(
    variant: VariantName, data: st.DataObject
) -> None:
    scenario: Scenario = data.draw(scenarios("fastdeploy", variant))
    scenario = scenario.model_copy(update={"pipeline": data.draw(PACINGS)})
    result = run_scenario(scenario, Path())
    record, notes = result.record, result.notes
    assert scenario.workload.requests is not None
    assert len(record.requests) == len(scenario.workload.requests)
    times = [*record.steps.start, *record.steps.end]
    assert sorted(times[: len(times) // 2]) == times[: len(times) // 2]
    for i, life in record.requests.items():
        assert life.outcome is not None
        assert life.outcome is not Outcome.LOST
        assert life.ended_at is not None
        if life.outcome is Outcome.FINISHED:
            assert life.tokens > 0
            assert life.last_token == life.ended_at
            wrong = life.tokens != life.request.output_tokens
            assert wrong == any(note.startswith(f"request {i} received") for note in notes)
        if life.outcome is Outcome.STALLED:
            assert record.engine_halt is not None
            assert life.request.id in record.engine_halt.requests or record.engine_halt.kind in (
                "engine died",
                "livelock",
            )
    summarize(record)


@every_variant
@given(data=st.data())
def test_all_blocks_are_freed(variant: VariantName, data: st.DataObject) -> None:
    config = FastDeployConfig(variant=variant, **KNOBS["fastdeploy"](data.draw, variant))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 16)), max_size=6))
    run = pipeline(config, data.draw(PACINGS))
    record = run_clients(run, requests(*sizes), None)  # Checks while running
    if not run.dead and all(life.outcome is Outcome.FINISHED for life in record.requests.values()):
        assert run.manager.pool.free == config.num_blocks


def test_task_without_slot_kills_worker() -> None:
    # Request 0 preempts itself. Until the preemption is acknowledged, the request keeps the only
    # slot but does not count as running, so request 1 is admitted without a slot.
    config = FastDeployConfig(block_size=4, num_blocks=5, max_num_seqs=1, max_num_batched_tokens=16)
    pacing = Pacing(token_processor_lag=3.0, max_prefill_num=None)
    record = run_clients(pipeline(config, pacing), requests((16, 4), (20, 2)), None)
    assert record.engine_halt is not None
    assert record.engine_halt.kind == "engine died"
    assert "request 1 has no slot" in record.engine_halt.why
    assert {life.outcome for life in record.requests.values()} == {Outcome.STALLED}


def test_detects_livelock_at_first_repeated_state() -> None:
    # The only request computes two chunks, preempts itself for the third chunk, waits, computes two
    # chunks, and so on.
    config = FastDeployConfig(block_size=2, num_blocks=2, max_num_seqs=1, max_num_batched_tokens=2)
    record = run_clients(pipeline(config, Pacing()), requests((5, 1)), None)
    assert record.engine_halt is not None
    assert record.engine_halt.kind == "livelock"
    assert record.engine_halt.why == "the same decisions repeat without emitting a token"
    assert len(record.steps) < 10


class Deaf(Watched):
    """A pipeline whose messages are lost."""

    def receive(self, message: Message) -> MessageEffects:
        return MessageEffects()


@pytest.mark.parametrize("variant", ["fixed-reserve", "ratio"])
def test_reports_end_unknown_to_scheduler(variant: VariantName) -> None:
    run = pipeline(replace(ROOMY, variant=variant), Pacing(), Deaf)
    record = run_clients(run, requests((5, 3)), None)
    assert record.engine_halt is not None
    # although the variant ``ratio`` sends its block table repeatedly
    assert record.engine_halt.kind == "deadlock"
    assert record.engine_halt.why == (
        "slot 0: the worker has ended request 0, but the scheduler waits for its next token"
    )


def test_delayed_chunk_is_no_disagreement() -> None:
    # The blocks reserved for the request's own 100 output tokens prevent the second chunk.
    config = FastDeployConfig(
        variant="decode-only-preempt", block_size=4, num_blocks=12, max_num_batched_tokens=8
    )
    record = run_clients(pipeline(config, Pacing()), [Request(0, 20, 100, output_tokens=2)], None)
    assert record.engine_halt is not None
    assert record.engine_halt.why == "requests wait, but the scheduler can run none of them"


def test_steps_without_token_are_livelock() -> None:
    config = FastDeployConfig(block_size=4096, num_blocks=100)
    record = run_clients(pipeline(config, Pacing(), Deaf), requests((5, 4000)), None)
    assert record.engine_halt is not None
    assert record.engine_halt.kind == "livelock"
    assert len(record.steps) == 1006  # 1000, plus one for each token that remains to be computed
    assert record.requests[0].outcome is Outcome.STALLED


def test_reports_missing_acknowledgement() -> None:
    # The only request preempts itself, and a worker without work sends no message.
    config = FastDeployConfig(
        block_size=4, num_blocks=5, max_num_seqs=1, idle_worker_sends_ack=False
    )
    record = run_clients(pipeline(config, Pacing()), requests((16, 4)), None)
    assert record.engine_halt is not None
    assert record.engine_halt.why == (
        "slot 0: no message will acknowledge the preemption of request 0"
    )
    assert pipeline_notes(record) == []  # the verdict contains the cycle
