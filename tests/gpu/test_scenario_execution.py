"""Tests that a real run of a scenario and a simulation with the measured step times make the same
decisions.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from simkv.conformance.decision_recorder import write_decision_trace
from simkv.conformance.decision_replay import check_trace
from simkv.conformance.decision_trace import read_trace
from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu.batch_runner import Runner, covering_config
from simkv.gpu.execution_record import CUT_SHORT, ExecutionRecord, GpuSetup
from simkv.gpu.scenario_execution import ScenarioExecution, runner_config
from simkv.scenario.scenario import Scenario
from simkv.schedulers.vllm.versions import RULES
from simkv.sim.run_record import RunRecord
from simkv.sim.step_log import COLUMNS
from simkv.validation.gpu_runs.timed_replay import compare_decisions, replay_timed
from simkv.workload.listed_requests import ListedRequest
from simkv.workload.workload_section import Workload
from tests.gpu import reference_model
from tests.laws.pressure_scenarios import plain_scenario
from tests.laws.random_scenarios import ENGINES, scenarios

SETUP = GpuSetup(MODEL_SHAPES["tiny"], graph_tokens=64)
every_engine = pytest.mark.parametrize(("engine", "variant"), ENGINES, ids=lambda name: name)


def in_milliseconds(scenario: Scenario) -> Scenario:
    """Return the scenario with milliseconds in place of seconds; a step of ``tiny`` takes about one
    millisecond.
    """

    def scaled(model: Any, *names: str) -> Any:
        given = {name: getattr(model, name) for name in names}
        return model.model_copy(update={k: v / 1000.0 for k, v in given.items() if v is not None})

    rows = [scaled(row, "arrival", "timeout") for row in scenario.workload.requests or ()]
    workload = scenario.workload.model_copy(update={"requests": rows})
    scenario = scenario.model_copy(update={"workload": workload})
    return scaled(scenario, "timeout", "horizon", "engine_ready")


def without_ends(scenario: Scenario) -> Scenario:
    """Return the scenario without client timeouts."""
    rows = scenario.workload.requests or ()
    rows = [row.model_copy(update={"timeout": None}) for row in rows]
    workload = scenario.workload.model_copy(update={"requests": rows})
    return scenario.model_copy(update={"workload": workload, "timeout": None, "horizon": None})


def times(run: ExecutionRecord) -> tuple[list[float], list[float]]:
    """Return the recorded durations of the steps and of the idle passes."""
    steps = [p.seconds for p in run.passes if p.timing]
    return steps, [p.seconds for p in run.passes if not p.timing]


def everything(record: RunRecord) -> dict[str, Any]:
    """Return the contents of a record, for comparison."""
    lives = {
        i: {name: getattr(life, name) for name in life.__slots__}
        for i, life in record.requests.items()
    }
    columns = {name: list(getattr(record.steps, name)) for name in COLUMNS}
    return {
        "lives": lives,
        "steps": columns,
        "end": record.end,
        "idle": record.idle_passes,
        "standstill": record.engine_halt,
    }


def check_l0(run: ExecutionRecord) -> None:
    """Check that a simulation with the run's step times makes the same decisions and the same
    record.
    """
    record, again, why = replay_timed(run.scenario, *times(run))
    verdict = compare_decisions(run.recorder.lines, again.lines)
    assert (why, verdict.step) == ("", None)
    assert everything(record) == everything(run.record)


def check_conform(run: ExecutionRecord, folder: Path) -> None:
    """Check that the recorded decisions, replayed without times, are equal line by line."""
    path = folder / "run.jsonl.gz"
    write_decision_trace(path, run.recorder, run.requests, run.stopped)
    result = check_trace(read_trace(path))
    assert result.difference is None
    assert result.steps > 0 or not run.passes


def check_tokens(run: ExecutionRecord, runner: Runner) -> None:
    """Compare the emitted tokens with the tokens of the dense model."""
    for life in run.record.requests.values():
        if life.outcome is Outcome.FINISHED:
            prompt = life.request.prompt_tokens
            tokens = runner.tokens(life.request.id, prompt + life.tokens)
            scores = reference_model.logits(runner.shape, runner.model.weights, tokens[:-1])
            assert tokens[prompt:] == scores[prompt - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize(("engine", "variant"), dict(ENGINES).items(), ids=lambda name: name)
def test_preemptions(engine, variant):
    """Preempted requests emit the same tokens as the dense model."""
    server = ScenarioExecution(plain_scenario(engine, variant), SETUP)
    run = server.serve()
    assert run.summary["preemptions"] > 0
    check_l0(run)
    check_tokens(run, server.runner)


@pytest.mark.parametrize(("engine", "variant"), dict(ENGINES).items(), ids=lambda name: name)
def test_clients_that_wait_for_answers(engine, variant):
    """The arrival of a request depends on the measured durations of earlier steps."""
    scenario = plain_scenario(engine, variant)
    workload = scenario.workload.model_copy(update={"max_concurrency": 3})
    run = ScenarioExecution(scenario.model_copy(update={"workload": workload}), SETUP).serve()
    assert run.summary["finished"] == len(run.requests)
    assert max(run.record.steps.running) <= 3
    assert len({life.request.arrival for life in run.record.requests.values()}) > 8
    check_l0(run)


def for_a_device(scenario: Scenario) -> Scenario:
    """Return the scenario without features that a device, the record or the replay lacks."""
    plain = {"rule": None, "kv_cache_groups": (0,), "lora_drain_wait_threshold": 0.0}
    plain |= {"num_speculative_tokens": 0, "enable_block_reuse": False}
    plain |= {"num_cpu_blocks": 0, "secondary_tiers": ()}
    known = {knob: value for knob, value in plain.items() if hasattr(scenario.engine, knob)}
    return scenario.model_copy(update={"engine": replace(scenario.engine, **known)})


#: Under the policy priority, these schedulers compute requests whose blocks are gone; the GPU
#: runner rejects this.
FCFS_ONLY = {name for name, rules in RULES.items() if not rules.removes_victims}


@every_engine
@settings(max_examples=settings.default.max_examples // 9, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_scenario(engine, variant, data, tmp_path_factory):
    scenario = for_a_device(in_milliseconds(data.draw(scenarios(engine, variant))))
    assume(variant not in FCFS_ONLY or scenario.engine.policy == "fcfs")
    if data.draw(st.booleans()):
        scenario = without_ends(scenario)
    server = ScenarioExecution(scenario, SETUP)
    run = server.serve()
    check_l0(run)
    if not run.cut_short:
        check_conform(run, tmp_path_factory.mktemp("trace"))
    # In mistral.rs, the prefix cache returns blocks that were never computed, and a preempted
    # request that replaces another request has no blocks. SGLang forgets that a prompt is chunked
    # if another prompt is chunked in the same pass.
    if not getattr(scenario.engine, "prefix_caching", False):
        assert run.summary["unbacked_tokens"] == 0 or engine == "mistralrs"
        assert run.summary["premature_tokens"] == 0 or engine == "sglang"
        if not run.summary["unbacked_tokens"] and not run.summary["premature_tokens"]:
            check_tokens(run, server.runner)


def test_horizon_after_client_left_is_not_a_stall(tmp_path):
    """FastDeploy continues to compute after the client has left: every request has its outcome, but
    the run was ended early.
    """
    scenario = plain_scenario("fastdeploy", "fixed-reserve")
    row = ListedRequest(arrival=0.0, prompt_tokens=50, output_tokens=300, timeout=1e-4)
    workload = Workload(requests=[row])
    scenario = scenario.model_copy(update={"workload": workload, "horizon": 0.01})
    run = ScenarioExecution(scenario, SETUP).serve()
    assert run.summary["starved"] + run.summary["timed_out"] == 1
    assert (run.summary["cut_off"], run.leftover, run.stopped) == (0, {0}, CUT_SHORT)
    write_decision_trace(tmp_path / "t.jsonl.gz", run.recorder, run.requests, run.stopped)
    last = gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes()).splitlines()[-1]
    assert json.loads(last) == {"truncated": True, "why": "the run reached its horizon"}


def test_runner_serves_several_scenarios():
    """The first run does not affect the tokens and decisions of the second run."""
    scenarios = [plain_scenario("vllm", "0.33.0"), plain_scenario("mistralrs", "pr2034")]
    largest = covering_config([runner_config(scenario, SETUP) for scenario in scenarios[:1] * 2])
    runner = Runner(SETUP.shape, replace(largest, seats=20, num_blocks=64), SETUP.device)
    for scenario in (*scenarios, scenarios[0]):
        block_size = {"block_size": 16}
        engine = replace(scenario.engine, **block_size)
        run = ScenarioExecution(
            scenario.model_copy(update={"engine": engine}), SETUP, runner
        ).serve()
        assert run.summary["finished"] == 16
        check_l0(run)
        check_tokens(run, runner)
    with pytest.raises(InputError, match="the GPU runner was built with"):
        ScenarioExecution(
            scenarios[0], SETUP, Runner(SETUP.shape, replace(largest, num_blocks=2), "cpu")
        )
