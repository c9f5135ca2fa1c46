"""Tests of blockers and verdicts of runs that were computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.explain.blame import Overtake, Preemption
from simkv.explain.diagnosis import Diagnosis, diagnose_run
from simkv.explain.ledger_kinds import LedgerKind
from simkv.explain.verdicts.deadlock_livelock import Deadlock, EngineDied, LivelockVerdict
from simkv.explain.verdicts.head_of_line import HeadOfLineBlocking
from simkv.explain.verdicts.priority_inversion import PriorityInversion
from simkv.explain.verdicts.thrashing import Thrashing
from simkv.explain.verdicts.unserved_requests import (
    RejectedRequests,
    Starvation,
    UnservableRequests,
)
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_attribution import Blocker, find_block_holdings
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from tests.laws.random_scenarios import (
    ENGINES,
    Run,
    run,
    scenarios,
)

VLLM = {
    "name": "vllm",
    "block_size": 4,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "max_model_len": 16,
}


def unit_steps(requests: list[dict[str, Any]], engine: dict[str, Any], **fields: Any) -> Run:
    """A run in which every step takes one second."""
    data = {"name": "x", "workload": {"requests": requests}, "engine": engine}
    return run(Scenario.model_validate(data | {"profile": "unit-step"} | fields))


def ask(arrival: float, prompt: int, output: int, **fields: Any) -> dict[str, Any]:
    return {"arrival": arrival, "prompt_tokens": prompt, "output_tokens": output, **fields}


def diagnosis(done: Run) -> Diagnosis:
    engine = done.scenario.engine
    return diagnose_run(done.record, find_engine_spec(engine).block_size(engine))


def only(found: Diagnosis, kind: type[Verdict]) -> Any:
    (verdict,) = [verdict for verdict in found.verdicts if isinstance(verdict, kind)]
    assert json.loads(json.dumps(verdict.to_json()))["verdict"] == verdict.name
    return verdict


@pytest.fixture(scope="module")
def queued() -> Run:
    """Return a run with 5 blocks: request 0 holds 2 in its prefill, and 3 from its first decode to
    its end at 4 s.

    Request 1 needs 3 blocks, so it waits. Request 2 needs only one block, but waits behind request
    1.
    """
    requests = [ask(0.0, 8, 4), ask(0.5, 12, 1), ask(0.5, 4, 1)]
    return unit_steps(requests, {**VLLM, "num_gpu_blocks": 6})


def test_blames_holders_of_blocks(queued: Run) -> None:
    found = diagnosis(queued)
    assert found.ledger == {
        0: [(LedgerKind.PREFILL, 0.0, 1.0), (LedgerKind.DECODE, 1.0, 4.0)],
        1: [
            (LedgerKind.UNSEEN, 0.5, 1.0),
            (LedgerKind.BLOCKS, 1.0, 4.0),
            (LedgerKind.PREFILL, 4.0, 5.0),
        ],
        2: [
            (LedgerKind.UNSEEN, 0.5, 1.0),
            (LedgerKind.BEHIND, 1.0, 4.0),
            (LedgerKind.PREFILL, 4.0, 5.0),
        ],
    }
    lives = queued.record.requests
    assert find_block_holdings(queued.record, lives[0], 4) == [(0.0, 1.0, 2), (1.0, 4.0, 3)]
    assert find_block_holdings(queued.record, lives[1], 4) == [(4.0, 5.0, 3)]
    assert found.blockers == [Blocker(0, seconds=6.0, block_seconds=9.0)]
    for waiting in (1, 2):
        assert found.blockers_of(waiting) == [Blocker(0, seconds=3.0, block_seconds=9.0)]
    assert found.blockers_of(0) == []
    assert (found.overtakes, found.preemptions, found.recompute_tokens) == (0, [], 0)
    assert found.waste == (0.0, 0.0, 0.0, 5.0)


def test_head_of_line_blocking(queued: Run) -> None:
    verdict = only(diagnosis(queued), HeadOfLineBlocking)
    assert verdict == HeadOfLineBlocking((1, 2), 3.0, 3.0, needs=4, free=2, other_needs=2)
    tight = unit_steps(
        [ask(0.0, 8, 4), ask(0.5, 12, 1), ask(0.5, 4, 1)], {**VLLM, "num_gpu_blocks": 5}
    )
    assert diagnosis(tight).verdicts == ()  # one block was free, request 2 needs one more


def test_preemption_names_victim_and_beneficiary() -> None:
    """Two requests fill the 4 blocks; at 1 s, request 0 needs a third block and preempts request 1.

    Request 0 ends at 3 s. Request 1 recomputes its 8 prompt tokens and its emitted token.
    """
    done = unit_steps([ask(0.0, 8, 3), ask(0.0, 8, 3)], {**VLLM, "num_gpu_blocks": 5})
    found = diagnosis(done)
    assert found.ledger[1] == [
        (LedgerKind.PREFILL, 0.0, 1.0),
        (LedgerKind.PREEMPTED, 1.0, 3.0),
        (LedgerKind.RECOMPUTE, 3.0, 4.0),
        (LedgerKind.DECODE, 4.0, 5.0),
    ]
    assert found.preemptions == [Preemption(at=1.0, victim=1, by=0, why="blocks", tokens=8)]
    assert found.blockers_of(1) == [Blocker(0, seconds=2.0, block_seconds=6.0)]
    assert find_block_holdings(done.record, done.record.requests[1], 4) == [
        (0.0, 1.0, 2),
        (3.0, 5.0, 3),
    ]
    assert found.recompute_tokens == 8
    assert isclose(found.waste.recompute, 8 / 9)  # in the step of 9 tokens from 3 s to 4 s
    assert found.waste.busy == 5.0
    assert found.verdicts == ()  # a single preemption is not thrashing


def test_waiting_for_slots_is_divided_equally() -> None:
    """Two requests occupy the two slots, one of them for 2 s and the other for 4 s."""
    engine = {**VLLM, "num_gpu_blocks": 64, "max_num_seqs": 2}
    found = diagnosis(unit_steps([ask(0.0, 4, 2), ask(0.0, 9, 4), ask(0.0, 4, 1)], engine))
    assert found.ledger[2] == [(LedgerKind.SLOT, 0.0, 2.0), (LedgerKind.PREFILL, 2.0, 3.0)]
    # request 0 has one block and then two, request 1 has three
    assert found.blockers_of(2) == [Blocker(0, 1.0, 3.0), Blocker(1, 1.0, 6.0)]


def test_waiting_for_steps_is_blamed_on_computing_requests() -> None:
    """mistral.rs prefills first: request 0 is skipped during the prefill of request 1."""
    engine = {"name": "mistralrs", "variant": "pr2031a", "num_gpu_blocks": 64}
    found = diagnosis(unit_steps([ask(0.0, 8, 3), ask(1.5, 8, 1)], engine))
    assert found.ledger[0] == [
        (LedgerKind.PREFILL, 0.0, 1.0),
        (LedgerKind.DECODE, 1.0, 2.0),
        (LedgerKind.HELD_UP, 2.0, 3.0),
        (LedgerKind.DECODE, 3.0, 4.0),
    ]
    assert found.blockers_of(0) == [Blocker(1, seconds=1.0, block_seconds=1.0)]


def test_overtakes_and_starvation() -> None:
    """With skip-blocked, small requests overtake request 1, whose client gives up at 6.5 s."""
    engine = {**VLLM, "variant": "0.33.0-skip-blocked", "num_gpu_blocks": 6}
    requests = [ask(0.0, 8, 8), ask(0.5, 12, 1, timeout=6.0), ask(1.5, 4, 1), ask(2.5, 4, 1)]
    found = diagnosis(unit_steps(requests, engine))
    assert found.worst_overtakes == [Overtake(victim=1, by=2, seconds=4.5, others=2)]
    assert found.overtakes == 2
    verdict = only(found, Starvation)
    assert verdict.requests == (1, 2)
    assert (verdict.waited, verdict.lived, verdict.tokens) == (6.0, 6.0, 0)
    assert verdict.kinds == {LedgerKind.UNSEEN: 0.5, LedgerKind.BLOCKS: 5.5}
    # Request 0 holds 3 of the blocks throughout; requests 2 and 3 each hold one more block for a
    # second.
    assert [blocker.id for blocker in verdict.behind] == [0, 2, 3]
    assert verdict.behind[0].seconds == pytest.approx(3.5 + 2 * 3 / 4)
    assert verdict.behind[1].seconds == pytest.approx(1 / 4)


def test_main_blocker_causes_a_quarter_of_the_wait() -> None:
    blockers = tuple(Blocker(i, seconds, 1.0) for i, seconds in ((3, 4.0), (5, 3.9)))
    verdict = Starvation((1,), (1,), 120.0, 120.0, 0, {}, blockers, None)
    assert verdict.main_blocker is None
    assert (
        "; of this, 4.000 s because of request 3 and 3.900 s because of request 5" in verdict.text
    )
    mostly = replace(verdict, waited=16.0)
    assert mostly.main_blocker == 3
    assert "mainly because of request 3 (4.000 s)" in mostly.text


def test_work_after_the_client_left_is_wasted() -> None:
    """mistral.rs does not notice that the client left at 2.5 s, and decodes until 5 s."""
    engine = {"name": "mistralrs", "variant": "pr2034", "num_gpu_blocks": 64}
    found = diagnosis(unit_steps([ask(0.0, 8, 5, timeout=2.5)], engine))
    assert found.waste == (2.0, 0.0, 0.0, 5.0)


def test_priority_inversion() -> None:
    """With a single slot and first come, first served, request 1 is admitted before the more urgent
    request 2.
    """
    requests = [
        ask(0.0, 4, 2, priority=1),
        ask(0.2, 4, 3, priority=5),
        ask(0.5, 4, 1, priority=0),
    ]
    engine = {**VLLM, "num_gpu_blocks": 64, "max_num_seqs": 1}
    verdict = only(diagnosis(unit_steps(requests, engine)), PriorityInversion)
    assert verdict == PriorityInversion((2, 1), count=1, at=2.0, seconds=3.0, priorities=(0, 5))
    assert "a request was served before a more urgent one" in verdict.text
    assert not diagnosis(unit_steps(requests, {**engine, "policy": "priority"})).verdicts


def test_thrashing_names_victim_and_beneficiary() -> None:
    """Prompts have two lengths: mistral.rs runs one length and discards the KV of the other each
    time.
    """
    engine = {"name": "mistralrs", "variant": "bucketed", "num_gpu_blocks": 64}
    found = diagnosis(unit_steps([ask(0.0, 40, 6), ask(0.5, 50, 6)], engine))
    verdict = only(found, Thrashing)
    assert verdict.requests == (1, 0)
    assert verdict.reasons == {"bucket": len(found.preemptions)}
    assert all(preemption[1:4] == (1, 0, "bucket") for preemption in found.preemptions)
    assert verdict.repeated == sum(p.tokens for p in found.preemptions) == found.recompute_tokens
    assert verdict.times == len(found.preemptions) > 1


def test_livelock_shows_its_cycle() -> None:
    """A prompt of 20 tokens is computed in chunks of 8 and has 4 blocks: the third chunk evicts the
    first two.

    Before #37307, vLLM admitted the first chunk even if the whole prompt did not fit.
    """
    engine = {
        **VLLM,
        "num_gpu_blocks": 5,
        "max_model_len": 64,
        "startup_check": False,
        "scheduler_reserve_full_isl": False,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 8,
    }
    done = unit_steps([ask(0.0, 20, 4)], engine)
    verdict = only(diagnosis(done), LivelockVerdict)
    assert verdict.requests == (0,)
    assert (verdict.seconds, verdict.decisions) == (3.0, 3)
    assert [(m.prefill, m.decode, m.preempted) for m in verdict.cycle] in (
        [((0,), (), ()), ((0,), (), ()), ((), (), (0,))],
        [((0,), (), ()), ((), (), (0,)), ((0,), (), ())],
        [((), (), (0,)), ((0,), (), ()), ((0,), (), ())],
    )
    assert "prefill request 0 → " in verdict.text
    assert only(diagnosis(done), UnservableRequests) == UnservableRequests(
        (0,), needs=6, has=4, all=(0,)
    )


def test_livelock_inside_one_call() -> None:
    """The loop over the queue of mistral.rs #2043 never ends; the engine reports the requests."""
    engine = {"name": "mistralrs", "variant": "seed", "block_size": 8, "num_gpu_blocks": 24}
    verdict = only(
        diagnosis(unit_steps([ask(0.0, 64, 100), ask(1.0, 136, 10)], engine)), LivelockVerdict
    )
    assert verdict.requests == (0, 1)
    assert verdict.cycle == ()


def test_deadlock_of_an_engine_that_admits_no_request() -> None:
    """The scheduler of mistral.rs from before the length buckets leaves one slot unused."""
    engine = {"name": "mistralrs", "variant": "seed", "max_num_seqs": 1}
    found = diagnosis(unit_steps([ask(0.0, 8, 3), ask(0.0, 8, 3)], engine))
    verdict = only(found, Deadlock)
    assert verdict.requests == (0,)
    assert (verdict.head, verdict.kind, verdict.holds) == (0, LedgerKind.SLOT, {})
    assert verdict.stuck == (0, 1)
    assert len(found.verdicts) == 1


def test_deadlock_shows_held_and_missing_blocks() -> None:
    """In FastDeploy, a prompt outgrows the cache that it fills, and there is no other request to
    preempt.
    """
    engine = {
        "name": "fastdeploy",
        "variant": "decode-only-preempt",
        "block_size": 4,
        "num_blocks": 4,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 2,
    }
    verdict = only(diagnosis(unit_steps([ask(0.0, 20, 2)], engine)), Deadlock)
    assert verdict.requests == (0,)
    assert verdict.holds[0] + verdict.lacks[0] == 5
    assert verdict.free == 4 - verdict.holds[0]


BURST = {"burst": {"num_prompts": 40, "prompt_tokens": 800, "output_tokens": 10}}


@pytest.mark.parametrize(
    ("engine", "verdict"),
    [
        ({"name": "vllm", "max_model_len": 4096, "startup_check": False}, Deadlock),
        ({"name": "fastdeploy", "num_blocks": 40, "block_size": 16}, Deadlock),
        ({"name": "mistralrs", "variant": "seed", "block_size": 16}, RejectedRequests),
        ({"name": "sglang", "max_total_num_tokens": 640, "page_size": 16}, RejectedRequests),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_burst_without_a_request_that_fits(engine: dict[str, Any], verdict: type[Verdict]) -> None:
    blocks = {"num_gpu_blocks": 40 + (engine["name"] == "vllm")}
    if engine["name"] in ("vllm", "mistralrs"):
        engine = engine | blocks
    scenario = {"name": "x", "workload": BURST, "engine": engine, "profile": "unit-step"}
    found = diagnosis(run(Scenario.model_validate(scenario)))
    assert only(found, verdict)
    too_large = only(found, UnservableRequests)
    assert (len(too_large.all), too_large.needs, too_large.has) == (40, 51, 40)
    assert "11 are missing" in too_large.text


def test_single_request_is_singular() -> None:
    assert UnservableRequests((0,), needs=5, has=4, all=(0,)).text.endswith("has 4; 1 is missing")
    starved = Starvation((0,), (0,), 1.0, 2.0, tokens=1, kinds={}, behind=(), overtaken=None)
    assert (
        starved.text
        == "one request starved; request 0 waited 1.000 s of its 2.000 s in the system and "
        "received one token"
    )


OVERLOAD = {
    "num_prompts": 200,
    "request_rate": 2000.0,
    "prompt_tokens": {"distribution": "lognormal", "mean": 512},
    "output_tokens": {"distribution": "lognormal", "mean": 256},
}


@pytest.mark.parametrize(
    "engine",
    [
        {"name": "vllm", "num_gpu_blocks": 61, "startup_check": False},
        {"name": "fastdeploy", "num_blocks": 60, "block_size": 16, "max_num_seqs": 64},
    ],
    ids=lambda engine: engine["name"],
)
def test_undersized_cache_under_overload(engine: dict[str, Any]) -> None:
    """In these cases, other simulators loop endlessly (inference-sim #297, #529, #963)."""
    scenario = {"name": "x", "workload": {"arrivals": OVERLOAD}, "engine": engine}
    done = run(Scenario.model_validate(scenario | {"profile": "unit-step"}))
    found = diagnosis(done)
    deadlock, too_large = only(found, Deadlock), only(found, UnservableRequests)
    assert deadlock.head in too_large.all
    assert deadlock.lacks[deadlock.head] > deadlock.free == too_large.has == 60
    assert set(too_large.all) <= set(deadlock.stuck)


def test_engine_that_dies() -> None:
    engine = {"name": "mistralrs", "variant": "bucketed", "block_size": 8, "num_gpu_blocks": 25}
    found = diagnosis(unit_steps([ask(0.0, 64, 100), ask(1.0, 136, 10)], engine))
    verdict = only(found, EngineDied)
    assert verdict.requests == (0,)
    assert (
        found.ledger[1][-1].kind is LedgerKind.STALLED or found.ledger[1][-1].end == verdict.since
    )
    assert found.preemptions[0].why == "patience"
    assert found.preemptions[0].by == 1


# Random scenarios


@pytest.mark.parametrize(("engine", "variant"), ENGINES, ids=lambda name: name)
@given(data=st.data())
def test_blame_adds_up(engine: str, variant: str, data: st.DataObject) -> None:
    """Waiting times and blocks are attributed once, and every verdict has its evidence."""
    done = run(data.draw(scenarios(engine, variant)))
    record, found = done.record, diagnosis(done)
    waiting = (
        kind
        for kind in LedgerKind
        if kind not in (LedgerKind.UNSEEN, LedgerKind.STALLED, LedgerKind.QUEUED)
    )
    shared = sum(blocker.seconds for blocker in found.blockers)
    assert shared <= sum(found.totals.get(kind, 0.0) for kind in waiting) + 1e-6
    for i in record.requests:
        blockers = found.blockers_of(i)
        assert i not in [blocker.id for blocker in blockers]
        lasts = sum(tile.seconds for tile in found.ledger[i])
        assert sum(blocker.seconds for blocker in blockers) <= lasts + 1e-6
    assert len(found.preemptions) == sum(
        len(life.preempted_at) for life in record.requests.values()
    )
    assert 0.0 <= found.waste.total <= found.waste.busy + 1e-6
    for verdict in found.verdicts:
        assert verdict.requests
        assert set(verdict.requests) <= record.requests.keys()
        assert json.dumps(verdict.to_json())
        assert verdict.text
    if all(life.outcome == "finished" for life in record.requests.values()):
        assert {type(verdict) for verdict in found.verdicts} <= {
            Thrashing,
            HeadOfLineBlocking,
            PriorityInversion,
        }
    else:
        assert found.verdicts or done.scenario.horizon is not None


@given(data=st.data())
def test_held_blocks_match_the_pool(data: st.DataObject) -> None:
    """Without a prefix cache, a vLLM request holds exactly the blocks of its computed tokens."""
    scenario = data.draw(scenarios("vllm", "0.33.0"))
    knobs: dict[str, Any] = {"enable_prefix_caching": False, "async_scheduling": False}
    knobs["kv_cache_groups"] = (0,)
    knobs |= {"num_speculative_tokens": 0, "num_cpu_blocks": 0}  # drafts have blocks too
    knobs["secondary_tiers"] = ()
    knobs["prefix_cache_retention_interval"] = None
    engine = type(scenario.engine)(**{**vars(scenario.engine), **knobs})
    record = run(scenario.model_copy(update={"engine": engine})).record
    held = [
        holding
        for life in record.requests.values()
        for holding in find_block_holdings(record, life, engine.block_size)
    ]
    for row, at in enumerate(record.steps.decided):
        if any(
            at == life.ended_at for life in record.requests.values() if life.outcome != "finished"
        ):
            continue  # an abort frees blocks between two decisions at the same time
        now = sum(holding.blocks for holding in held if holding.start <= at < holding.end)
        assert now == record.num_blocks - record.steps.free_blocks[row]
