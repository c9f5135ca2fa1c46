"""Tests that a leap changes nothing: without leaping, every record is the same."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Collection
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.scheduler_protocol import Batch, Completion, Scheduler
from simkv.costs.cost_profile import CostProfile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.explain.wait_ledger import build_ledger
from simkv.metrics.run_metrics import request_rows, step_rows, summarize
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.replica_base import build_queue_limit
from simkv.sim.run_record import RunRecord
from simkv.workload.workload_section import generate_requests
from tests.laws.random_scenarios import ENGINES, let_copy, scenarios

#: A profile with every kind of cost term, so that successive decode steps have growing lengths.
COSTS = {
    "name": "growing",
    "engine": "any",
    "model": "none",
    "gpu": "none",
    "basis": "assumed",
    "terms": [
        {"name": "step", "feature": "steps", "seconds": 0.1},
        {"name": "prompt", "feature": "prefill_tokens", "seconds": 0.013},
        {"name": "batch", "feature": "decode_seqs", "pieces": [{"base": 0.01, "slope": 0.003}]},
    ],
    "idle_pass_s": 0.001,
    "range": {"decode_context": [3, 60]},
    "fit": {"points": 0},
    "source": ["made up"],
}
LINEAR = {"name": "context", "feature": "decode_context", "seconds": 0.0007}
#: Attention looked up by the mean context, and between the mean and the longest of unequal decodes.
ATTENTION = {
    "slices": [
        {
            "prefill_tokens": tokens,
            "decode_seqs": seqs,
            "rows": [
                {
                    "prefill_context": 0,
                    "decode_context": [1, 8, 40],
                    "seconds": [0.001 * (tokens + seqs * x**1.5) for x in (1, 8, 40)],
                }
            ],
        }
        for tokens, seqs in ((0, 1), (0, 4), (2, 0), (8, 0), (2, 1), (8, 4))
    ],
    "skew": {
        "default": 0.3,
        "decode_seqs": [2, 99],
        "rate": [0.5, 1],
        "longest": [9, 999],
        "prefill_context": [0, 99],
        "shares": [[0, 1, 0, 1, 0, 0.7], [0, 0, 1, 1, 0, 0.1]],
    },
}
CURVED = {"name": "context", "feature": "decode_context", "table": [[0, 0], [40, 0.05], [90, 0.06]]}


def state(scheduler: Scheduler) -> tuple[Any, ...]:
    """Return the state of a scheduler that determines its decisions, and its visible state."""
    held = dict(scheduler.blocks_held())
    ids = scheduler.waiting_ids(), scheduler.running_ids()
    return scheduler.fingerprint(), *ids, held, scheduler.free_blocks


class Twinned:
    """A scheduler that leaps, with a twin that makes single steps and must reach the same state."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.in_flight: deque[Batch] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def schedule(self) -> Batch:
        self.in_flight.append(self.inner.schedule())
        return self.in_flight[-1]

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        self.in_flight.popleft()
        return self.inner.complete(batch, ended)

    def skip(self, steps: int) -> list[int]:
        twin, under_way = copy.deepcopy((self.inner, self.in_flight))
        free, resting = [], not under_way
        for _ in range(steps):
            if under_way:
                twin.complete(under_way.popleft(), ())
            under_way.append(twin.schedule())
            free.append(twin.free_blocks)
        if resting:  # between two idle passes
            twin.complete(under_way.popleft(), ())
        assert self.inner.skip(steps) == free
        assert state(self.inner) == state(twin), f"after a leap of {steps}"
        return free


def record(scenario: Scenario, profile: CostProfile, *, leaping: bool) -> tuple[RunRecord, int]:
    """Run a scenario; return its record and the number of leaps."""
    scheduler: Any = build_scheduler(scenario.engine)
    engine = Engine(
        simpy.Environment(),
        Twinned(scheduler) if leaping else scheduler,
        SimulatedExecutor(profile),
        scenario.engine_ready,
        leaping=leaping,
    )
    engine.queue_limit = build_queue_limit(scenario.engine)
    let_copy(engine, scenario)
    requests = generate_requests(scenario.workload, scenario.timeout)
    return run_clients(engine, requests, scenario.horizon), engine.leaps


def stretched(scenario: Scenario, factor: int) -> Scenario:
    """Return the scenario with outputs ``factor`` times as long, so that leaps occur."""
    rows = scenario.workload.requests
    assert rows is not None
    longer = [
        row.model_copy(
            update={
                "output_tokens": row.output_tokens * factor,
                "max_tokens": row.max_tokens and row.max_tokens * factor,
            }
        )
        for row in rows
    ]
    workload = scenario.workload.model_copy(update={"requests": longer})
    return scenario.model_copy(update={"workload": workload})


def assert_same(a: Any, b: Any, where: str) -> None:
    """Compare integers and words exactly, times to 1e-9 relative."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    elif isinstance(a, float):
        assert math.isclose(a, b, rel_tol=1e-9), f"{where}: {a!r} != {b!r}"
    else:
        assert a == b, f"{where}: {a!r} != {b!r}"


@pytest.mark.parametrize(("engine", "variant"), ENGINES, ids=lambda name: name)
@given(data=st.data())
@settings(max_examples=28)
def test_leap_changes_nothing(engine: str, variant: str, data: st.DataObject) -> None:
    scenario = data.draw(scenarios(engine, variant))
    scenario = stretched(scenario, data.draw(st.sampled_from([1, 4, 9])))
    context = data.draw(st.sampled_from([LINEAR, CURVED, None]))
    costs = COSTS | {"attention": ATTENTION, "graph_sizes": [1, 2, 4, 8]}
    if context is not None:
        costs = COSTS | {"terms": [*COSTS["terms"], context]}
    profile = CostProfile.model_validate(costs)
    leaping, _ = record(scenario, profile, leaping=True)
    stepping, none = record(scenario, profile, leaping=False)
    assert none == 0
    assert_same(request_rows("", leaping), request_rows("", stepping), "requests")
    assert_same(step_rows("", leaping), step_rows("", stepping), "steps")
    assert_same(summarize(leaping), summarize(stepping), "summary")
    for i, life in leaping.requests.items():
        assert life.segments == stepping.requests[i].segments
        assert_same(life.preempted_at, stepping.requests[i].preempted_at, f"preempted_at {i}")
        assert list(life.causes) == stepping.requests[i].causes
    tiles = [
        [
            [(tile.kind, tile.start, tile.end) for tile in life]
            for life in build_ledger(run).values()
        ]
        for run in (leaping, stepping)
    ]
    assert_same(*tiles, "ledger")


@pytest.mark.parametrize(
    ("engine", "knobs"),
    [
        ("mistralrs", {}),
        ("mistralrs", {"prefix_caching": True}),
        ("mistralrs", {"variant": "pr2034july", "prefix_caching": True}),
        ("vllm", {}),
        ("sglang", {"max_total_num_tokens": 4096}),
        ("fastdeploy", {}),
        ("fastdeploy", {"variant": "ratio"}),
        ("fastdeploy", {"variant": "decode-only-preempt"}),
        ("trtllm", {}),
        ("trtllm", {"disable_overlap_scheduler": True}),
    ],
)
def test_scenarios_contain_leaps(engine: str, knobs: dict[str, Any]) -> None:
    """The test above would check nothing without leaps."""
    scenario = Scenario.model_validate(
        {
            "name": "x",
            "workload": {"burst": {"num_prompts": 3, "prompt_tokens": 9, "output_tokens": 200}},
            "engine": {"name": engine, **knobs},
            "profile": "unit-step",
        }
    )
    profile = CostProfile.model_validate(COSTS)
    run, leaps = record(scenario, profile, leaping=True)
    assert leaps > 0
    assert len(run.steps) > 10 * leaps


@pytest.mark.parametrize("leaping", [True, False])
def test_leaps_over_finished_decode_interval(leaping: bool) -> None:
    """SGLang waits for 999 passes after a prefill, although no request remains to decode."""
    knobs = {"prefill_decode_interval": 999, "prefill_max_requests": 1}
    scenario = Scenario.model_validate(
        {
            "name": "x",
            "workload": {"burst": {"num_prompts": 2, "prompt_tokens": 9, "output_tokens": 1}},
            "engine": {"name": "sglang", "max_total_num_tokens": 4096, **knobs},
            "profile": "unit-step",
        }
    )
    scheduler: Any = Twinned(build_scheduler(scenario.engine))
    decided = []
    decide = scheduler.schedule
    scheduler.schedule = lambda: decided.append(1) or decide()
    executor = SimulatedExecutor(CostProfile.model_validate(COSTS))
    engine = Engine(simpy.Environment(), scheduler, executor, leaping=leaping)
    run = run_clients(engine, generate_requests(scenario.workload, None), None)
    assert 990 < run.idle_passes < 1000
    assert [life.tokens for life in run.requests.values()] == [1, 1]
    assert (len(decided) < 500) == leaping


def test_leap_waits_until_no_request_is_skipped_for_its_adapter() -> None:
    """After a pass of SGLang that skips requests, later passes may skip none."""
    rows = [
        {"arrival": 0.3, "prompt_tokens": 1, "output_tokens": 4},
        {"arrival": 0.0, "prompt_tokens": 1, "output_tokens": 16, "lora": "b"},
        {"arrival": 0.0, "prompt_tokens": 1, "output_tokens": 4},
        {"arrival": 0.0, "prompt_tokens": 1, "output_tokens": 12, "lora": "b"},
        {"arrival": 0.0, "prompt_tokens": 1, "output_tokens": 4},
    ]
    engine = {
        "name": "sglang",
        "max_total_num_tokens": 20,
        "page_size": 2,
        "max_running_requests": 2,
        "max_prefill_tokens": 1,
        "schedule_policy": "lpm",
        "disable_overlap_schedule": True,
        "enable_lora": True,
        "max_loras_per_batch": 1,
        "schedule_conservativeness": 0.0,
        "retract_decode_steps": 0,
        "clip_max_new_tokens_estimation": 1,
    }
    scenario = Scenario.model_validate(
        {"name": "x", "workload": {"requests": rows}, "engine": engine, "profile": "unit-step"}
    )
    profile = CostProfile.model_validate(COSTS)
    ledgers = [
        build_ledger(record(scenario, profile, leaping=leaping)[0]) for leaping in (True, False)
    ]
    assert_same(*ledgers, "ledger")
