from __future__ import annotations

import io
import json
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from simkv.cli.command_support import show
from simkv.core.engine_spec import EngineConfig
from simkv.core.figure_registry import FIGURE_NAMES
from simkv.core.outcome import FAILURES
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.narrative import LOWER_BOUND_NOTE
from simkv.report.whatif_tables import render_whatif, whatif_json
from simkv.scenario.packaged_scenarios import find_scenario
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.mistralrs.spec import build
from simkv.schedulers.mistralrs.versions import JULY_RULES, RULES
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig
from simkv.study.field_changes import with_knobs
from simkv.study.job_runner import ResultFile
from simkv.study.simulation_job import SimulationJob
from simkv.study.whatif.candidate_changes import (
    Change,
    _knobs,
    generate_changes,
    has_no_effect,
)
from simkv.study.whatif.trial_evaluation import (
    Evaluator,
    RequestEnding,
    RunFigures,
    evaluate_job,
    make_trial_job,
)
from simkv.study.whatif.whatif import (
    RANKED_LATENCIES,
    Effect,
    WhatIfResult,
    _judge,
    _ranked,
    evaluate_change,
    run_whatif,
)
from tests.laws.random_scenarios import ENGINES, scenarios
from tests.study.whatif.known_verdicts import (
    overload,
    queue_loop,
    scenario,
    six,
)

HERE = Path()
KNOB = Change("knob", "max_num_seqs", 8, 16)


def ask(scenario: Scenario, by: str | None = None) -> WhatIfResult:
    return run_whatif(scenario, Evaluator(HERE), by)


def figures(e2e_s: list[float], **latencies: float) -> RunFigures:
    """Return a run whose requests all finish; all latencies equal the mean E2E latency by
    default.
    """
    mean = 1000 * sum(e2e_s) / len(e2e_s)
    values = {name: mean if name in RANKED_LATENCIES else 0.0 for name in FIGURE_NAMES}
    values |= {"requests": len(e2e_s), "finished": len(e2e_s), **latencies}
    endings = tuple(RequestEnding(i, "finished", one) for i, one in enumerate(e2e_s))
    return RunFigures("served", "", values, endings)


def effect(found: WhatIfResult, change: str) -> Effect:
    return next(effect for effect in found.effects if str(effect.change) == change)


def test_finds_fix() -> None:
    """Requests of unequal length preempt each other; the published fix lets them run together."""
    found = ask(six())
    assert found.best is not None
    fix = effect(found, "unequal_decodes: preempt -> run together")
    assert found.effects.index(fix) <= 1
    assert next(e for e in found.effects if e.change.kind == "rule") is fix
    assert found.best.judgement == "helps"
    assert "preemptions 22 -> 0" in found.best.sentence
    assert found.base["preemptions"] == 22
    assert found.best.faster == (0, 1, 2)
    assert not found.best.slower
    assert effect(found, "variant: bucketed -> pr2031a").figures["preemptions"] == 0


def test_single_rule_matches_variant() -> None:
    found = ask(queue_loop())
    wait = effect(found, "unequal_decodes: preempt -> wait")
    assert wait.figures == effect(found, "variant: bucketed -> pr2031").figures
    oldest = effect(found, "decode_order: newest first -> oldest first")
    assert oldest.figures == effect(found, "variant: bucketed -> merged2250").figures


def test_patience_prevents_halt() -> None:
    found = ask(queue_loop(2, waiting_timeout=64))
    assert found.base.verdict == "engine died"
    assert found.best is not None
    assert found.best.judgement == "fixes"
    assert found.best.sentence == "waiting_timeout: 64 -> 128: 2 stalled (engine died) -> 0"
    assert found.best.newly_finished == (0, 1)
    memory = effect(found, "num_gpu_blocks: 25 -> 50")
    assert memory.change.kind == "memory"
    assert memory.judgement == "fixes"
    assert found.effects.index(memory) > found.effects.index(found.best)


def test_lists_helped_and_hurt_requests() -> None:
    """The order of requests determines which request loses its blocks: one request gains what the
    other loses.
    """
    requests = [{"prompt_tokens": 40, "output_tokens": 30, "arrival": i} for i in range(2)]
    engine = {"name": "mistralrs", "variant": "bucketed", "block_size": 8, "num_gpu_blocks": 17}
    found = ask(scenario(engine, requests))
    oldest = effect(found, "decode_order: newest first -> oldest first")
    assert (oldest.faster, oldest.slower) == ((0,), (1,))
    assert oldest.judgement == "changes little"
    assert oldest.sentence.endswith(": request 0 faster, request 1 slower")
    assert oldest.e2e_ratio == pytest.approx(1.0)


def test_effect_matches_two_runs() -> None:
    base = overload()
    found = ask(base)
    assert found.best is not None
    assert str(found.best.change) == "max_num_seqs: 1 -> 16"  # the default
    after = evaluate_job(make_trial_job(with_knobs(base, max_num_seqs=16), HERE))
    best = found.best
    assert best.figures == after
    starved = [e.id for e in found.base.endings if e.outcome == "starved"]
    served = [e.id for e in after.endings if e.outcome == "finished"]
    assert best.newly_finished == tuple(i for i in starved if i in served)
    both = [(a.e2e_s, b.e2e_s) for a, b in zip(found.base.endings, after.endings, strict=True)]
    pairs = [(a, b) for a, b in both if a is not None and b is not None]
    assert best.e2e_ratio == pytest.approx(sum(b for _, b in pairs) / sum(a for a, _ in pairs))
    assert f"4 starved -> {after['starved']:.0f}" in best.sentence


def test_default_of_the_launcher_is_tried(tmp_path: Path) -> None:
    """A setting far below its default: neither half nor twice its value suffices."""
    (tmp_path / "s.yaml").write_text(
        "name: few\n"
        "workload: {arrivals: {num_prompts: 100, request_rate: 6, prompt_tokens: 500, "
        "output_tokens: 200, seed: 1}}\n"
        "engine: {name: vllm, max_num_seqs: 8, max_model_len: 8192}\n"
        "hardware: {gpu: L4, model: llama-3.1-8b}\n"
    )
    case = load(tmp_path / "s.yaml")["run"]
    tried = {
        change.after
        for change, _ in generate_changes(case, tmp_path)
        if change.field == "max_num_seqs"
    }
    assert tried == {4, 16, 256}
    usual = with_knobs(case, tmp_path, max_num_seqs=256)
    again = [change.after for change, _ in generate_changes(usual, tmp_path)]
    assert 512 in again


def test_ranks_by_finished_requests_first() -> None:
    finished = [e.figures["finished"] for e in ask(overload()).effects]
    assert finished == sorted(finished, reverse=True)
    assert finished[0] > 6


def test_ranks_similar_latencies_by_preemptions() -> None:
    """The loop of FastDeploy 5696 ends with reserved blocks, and is only shortened by larger
    steps.
    """
    path = find_scenario(Path("fastdeploy-5696-preempt-loop"))
    # The default of max_num_batched_tokens also ends the loop, with shorter latencies.
    found = run_whatif(
        load(path)["before"], Evaluator(path.parent), wanted=lambda change: change.after != 8192
    )
    helped = found.with_judgement("helps")
    ended, shorter = (
        effect(found, change)
        for change in ("reserve_init: 0 -> 16", "max_num_batched_tokens: 256 -> 512")
    )
    assert helped.index(ended) < helped.index(shorter)
    assert (found.base["preemptions"], ended.figures["preemptions"]) == (180, 1)
    assert shorter.figures["e2e_ms.mean"] < ended.figures["e2e_ms.mean"]
    assert shorter.figures["preemptions"] > 100


def test_ranks_changes_that_slow_many_requests_last() -> None:
    """A change that helps all requests ranks before a change that halves the latency of half of the
    requests and slows the other half.
    """
    base = figures([4.0] * 280)
    clean = evaluate_change(KNOB, base, figures([3.0] * 280))
    mixed = evaluate_change(KNOB, base, figures([0.5] * 143 + [4.4] * 137))
    assert mixed.figures["e2e_all_ms.mean"] < clean.figures["e2e_all_ms.mean"]
    assert (mixed.judgement, clean.judgement) == ("helps", "helps")
    assert _ranked([mixed, clean], None) == [clean, mixed]


def test_cancelled_requests_are_served() -> None:
    """A change does not help or hurt by the number of requests that their clients cancel."""
    base = figures([4.0] * 4)
    endings = (*base.endings[:3], RequestEnding(3, "cancelled", None))
    fewer = replace(base, values={**base.values, "finished": 3, "cancelled": 1}, endings=endings)
    found = evaluate_change(KNOB, base, fewer)
    assert (found.judgement, found.newly_failed) == ("changes little", ())
    back = evaluate_change(KNOB, fewer, base)
    assert (back.judgement, back.newly_finished) == ("changes little", ())


def test_ranks_by_all_latencies() -> None:
    """The change with the shorter mean E2E ranks second if its tail of TTFT is much longer."""
    base = figures([4.0] * 10)
    even = evaluate_change(KNOB, base, figures([3.0] * 10))
    tail = evaluate_change(KNOB, base, figures([2.9] * 10, **{"ttft_all_ms.p99": 80000.0}))
    assert _ranked([tail, even], None) == [even, tail]


@pytest.mark.parametrize(
    ("engine", "field"),
    [(VllmConfig(), "gpu_memory_utilization"), (SglangConfig(), "mem_fraction_static")],
)
def test_tries_shares_of_memory_as_shares(engine: EngineConfig, field: str) -> None:
    values = dict(_knobs(engine, set()))[field]
    assert values
    assert all(0.5 < value < 1 for value in values)


def test_tries_the_words_of_a_setting_that_is_not_set() -> None:
    found = dict(_knobs(VllmConfig(), set()))
    assert found["mamba_cache_mode"] == ("align", "all")
    assert found["kv_connector"] == () or all(isinstance(v, str) for v in found["kv_connector"])


def test_skips_tighter_limits() -> None:
    """Clients have short timeouts: 1,024 tokens per step serve some of them, 256 serve fewer."""
    rows = [{"prompt_tokens": 250, "output_tokens": 2} for _ in range(20)]
    base = scenario({"name": "vllm", "max_model_len": 512}, rows, timeout=4.5)
    found = ask(base)
    name = "max_num_scheduled_tokens"
    tried = {e.change.after: e.figures["finished"] for e in found.effects if e.change.field == name}
    assert found.base["finished"] > tried[1024] > tried[256]
    assert [change.after for change in found.skipped if change.field == name] == [64]
    assert "Not tried, because smaller changes of the same field served fewer requests" in " ".join(
        map(str, render_whatif(found))
    )
    after = evaluate_job(make_trial_job(with_knobs(base, max_num_scheduled_tokens=64), HERE))
    assert after["finished"] <= tried[256]


def test_ranks_by_figure() -> None:
    found = ask(six(), "longest_stall_s")
    values = [effect.figures["longest_stall_s"] for effect in found.effects]
    assert values == sorted(values)
    assert found.best is not None
    assert "longest_stall_s" in found.best.sentence
    values = [e.figures["output_throughput"] for e in ask(six(), "output_throughput").effects]
    assert values == sorted(values, reverse=True)


def test_no_fix_for_healthy_run() -> None:
    found = ask(scenario({"name": "mistralrs"}, [{"prompt_tokens": 5, "output_tokens": 2}]))
    assert found.best is None
    assert {effect.judgement for effect in found.effects} == {"changes nothing"}


def test_result_is_independent_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    once = ask(queue_loop())
    monkeypatch.setattr(Evaluator, "POOL_PAYS", -1.0)
    monkeypatch.setattr(Evaluator, "POOL_LEAST", -1.0)
    with Evaluator(HERE, workers=2) as beside:
        assert run_whatif(queue_loop(), beside) == once


def test_json_output() -> None:
    found = ask(queue_loop())
    told = json.loads(json.dumps(whatif_json(found), allow_nan=False))
    assert told["best"] == found.best.sentence if found.best else None
    assert [row["sentence"] for row in told["changes"]] == [e.sentence for e in found.effects]
    assert told["base"]["verdict"] == "engine died"


def test_results_are_immutable() -> None:
    found = ask(six())
    for thing in (found, found.effects[0], found.effects[0].change, found.base):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, fields(thing)[0].name, None)


# Changes to try


def differences(before: Any, after: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(after).items() if asdict(before)[name] != value}


@pytest.mark.parametrize(("engine", "variant"), ENGINES)
def test_every_change_has_one_field(engine: str, variant: str) -> None:
    base = scenario(
        {"name": engine, "variant": variant}, [{"prompt_tokens": 9, "output_tokens": 2}]
    )
    tried = list(generate_changes(base, HERE))
    assert len({(change.kind, change.field, change.after) for change, _ in tried}) == len(tried)
    for change, job in tried:
        assert change.before != change.after
        if not isinstance(job, SimulationJob):
            assert str(job)
            continue
        other = job.scenario
        assert other.model_copy(update={"engine": base.engine}) == base
        if change.kind == "rule":
            assert job.rules is not None
            assert other.engine == base.engine
            assert differences(RULES[variant], job.rules) == {change.field: change.after}
            continue
        assert job.rules is None
        found = differences(base.engine, other.engine)
        assert found.pop(change.field) == change.after
        if change.field == "block_size":  # the same memory with other block sizes
            (name,) = found
            assert name in ("num_gpu_blocks", "num_blocks")
            before, after = asdict(base.engine), asdict(other.engine)
            former = before[name] * before["block_size"]
            assert former - after["block_size"] < after[name] * after["block_size"] <= former
        else:
            assert not found


def test_every_knob_and_variant_is_tried() -> None:
    base = scenario({"name": "sglang"}, [{"prompt_tokens": 9, "output_tokens": 2}])
    tried = {change.field for change, _ in generate_changes(base, HERE)}
    # Adapters of requests need support, so variants without this support are not tried.
    assert tried == {knob.name for knob in fields(base.engine)} - {"name", "enable_lora"}
    values = {
        change.after
        for change, _ in generate_changes(base, HERE)
        if change.field == "schedule_policy"
    }
    policies = {"lpm", "hrrn", "lof", "dfs-weight", "routing-key", "shortest-prefill-first"}
    assert values == policies | {"random"}  # this is rejected with a message
    assert Change("knob", "x", True, None).__str__() == "x: yes -> none"


@pytest.mark.parametrize(
    ("drafts", "accepted", "tried"), [(0, None, False), (0, 0.5, True), (2, None, True)]
)
def test_tries_drafts_only_with_acceptance(
    drafts: int, accepted: float | None, tried: bool
) -> None:
    workload = {"burst": {"num_prompts": 1, "prompt_tokens": 1, "output_tokens": 1}}
    engine = {"name": "vllm", "num_speculative_tokens": drafts, "speculative_method": "ngram"}
    said = {"name": "t", "workload": {**workload, "acceptance": accepted}, "engine": engine}
    found = generate_changes(Scenario.model_validate({**said, "profile": "unit-step"}), HERE)
    assert any(change.field == "num_speculative_tokens" for change, _ in found) is tried


def test_skips_unused_rules() -> None:
    tried = {
        change.field
        for change, _ in generate_changes(six("pr2034july"), HERE)
        if change.kind == "rule"
    }
    assert tried == set(JULY_RULES)
    assert not [
        change for change, _ in generate_changes(six("seed"), HERE) if change.kind == "rule"
    ]


@settings(max_examples=80)
@given(data=st.data())
def test_leap_changes_nothing_under_changed_rules(data: st.DataObject) -> None:
    variant = data.draw(st.sampled_from(sorted(RULES)))
    chosen = data.draw(scenarios("mistralrs", variant))
    rules = [
        case.rules
        for change, case in generate_changes(chosen, HERE)
        if isinstance(case, SimulationJob)
    ]
    changed = data.draw(st.sampled_from([r for r in rules if r is not None]))

    def run(leaping: bool) -> tuple[Any, list[tuple[Any, ...]]]:
        scheduler = build(chosen.engine, changed)  # type: ignore[arg-type]
        result = run_scenario(chosen, HERE, leaping=leaping, scheduler=scheduler)
        lives = result.record.requests
        told = [(i, life.outcome, life.tokens, life.recomputed_tokens) for i, life in lives.items()]
        return result.summary["verdict"], told

    assert run(True) == run(False)


# Consistency


def ended(finished: int, outcome: str, faster: float = 1.0) -> RunFigures:
    """Return metrics of ten requests; requests that did not finish have the given outcome."""
    failed = dict.fromkeys((*map(str, FAILURES), "cancelled"), 0.0) | {outcome: 10.0 - finished}
    values = {"requests": 10.0, "finished": float(finished), **failed, "longest_stall_s": 0.0}
    endings = tuple(
        RequestEnding(
            i, "finished" if i < finished else outcome, faster * 5 if i < finished else None
        )
        for i in range(10)
    )
    return RunFigures(outcome, "", {**values, "preemptions": 0.0, "e2e_ms.mean": 5.0}, endings)


def test_rejection_instead_of_starvation_is_no_help() -> None:
    base = ended(4, "starved")
    for by in (None, "starved"):
        judged = [
            _judge(base, other, 0.5, by)
            for other in (ended(4, "rejected", 0.5), ended(3, "rejected"), ended(6, "rejected"))
        ]
        assert judged[0] == "changes little"
        assert judged[1] != "helps"
        assert judged[2] == "helps"
    assert _judge(base, ended(4, "starved", 0.5), 0.5, None) == "helps"


def test_field_is_idle_only_if_no_value_matters() -> None:
    """A knob is reported with its value if halving it hurts, although doubling it changes
    nothing.
    """
    engine = {"name": "mistralrs", "variant": "bucketed", "block_size": 8, "num_gpu_blocks": 20}
    rows = [{"prompt_tokens": 16, "output_tokens": 8} for _ in range(4)]
    found = ask(scenario({**engine, "max_num_seqs": 4}, rows))
    by_field: dict[str, set[str]] = {}
    for e in found.effects:
        by_field.setdefault(e.change.field, set()).add(e.judgement)
    mixed = {name for name, what in by_field.items() if "changes nothing" in what and len(what) > 1}
    assert mixed >= {"max_num_seqs", "num_gpu_blocks"}
    (short,) = [str(part) for part in render_whatif(found) if str(part).startswith("No effect: ")]
    assert short.endswith(" more (--all, --json)")
    assert short.count(",") == 5
    lines = [str(part) for part in render_whatif(found, everything=True)]
    (line,) = [one for one in lines if one.startswith("No effect: ")]
    names = line.removeprefix("No effect: ").split(", ")
    assert not mixed & set(names)
    for name in mixed - {"variant"}:
        assert any(one.startswith(f"{name}: ") for one in names)


def test_output_fits_80_columns() -> None:
    """Lines are wrapped, and the most important values remain."""
    found = ask(six())
    short, full = at_80_columns(found), at_80_columns(found, everything=True)
    assert max(map(len, full.splitlines())) <= 80
    table = short[short.index("Change") :].splitlines()
    assert max(map(len, table)) <= 80
    heading = short[: short.index("───")]
    assert all(name in heading for name in ("Finished", "Median", "P99", "throughput"))
    names = " ".join(full.split())
    assert all(e.change.field in names for e in found.with_judgement("changes nothing"))


def test_latencies_include_unserved_requests() -> None:
    """The table shows latencies of all requests, and ``>`` marks a lower bound."""
    found = ask(overload())
    starved, fixed = found.base, found.with_judgement("fixes")[0].figures
    assert starved["ttft_all_ms.p99"] > starved["ttft_ms.p99"]
    assert "ttft_all_ms.p99" in starved.lower_bounds
    assert not fixed.lower_bounds
    table = at_80_columns(found)
    (none,) = [row for line in table.splitlines() if (row := line.split())[:1] == ["none"]]
    median, p99 = (starved[f"ttft_all_ms.{name}"] / 1000 for name in ("median", "p99"))
    at = none.index(">")
    assert none[at - 1 : at + 2] == [f"{median:.2f}", ">", f"{p99:.2f}"]
    assert LOWER_BOUND_NOTE in " ".join(table.split())
    assert LOWER_BOUND_NOTE not in " ".join(at_80_columns(ask(six())).split())
    assert "ttft_all_ms.p99" in whatif_json(found)["base"]["lower_bounds"]


def test_interrupted_runs_are_ranked_and_resumed(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    whole, ran = ask(six()), 0

    def tick() -> None:
        nonlocal ran
        ran += 1
        if ran == 8:
            raise KeyboardInterrupt

    with ResultFile(file) as store:
        found = run_whatif(six(), Evaluator(HERE, tick=tick, file=store))
    assert found.unfinished > 0
    assert found.skipped == ()
    tried = {str(effect.change): effect.figures for effect in whole.effects}
    assert found.effects
    assert all(tried[str(effect.change)] == effect.figures for effect in found.effects)
    assert at_80_columns(found).startswith(f"Interrupted: {len(found.effects)} of ")
    with ResultFile(file) as store:
        assert len(store.done) == 8
        again = run_whatif(six(), Evaluator(HERE, tick=tick, file=store))
    assert again == whole
    assert ran == len(file.read_text().splitlines()) == len({*digests_in(file)})


def digests_in(file: Path) -> list[str]:
    return [json.loads(line)["digest"] for line in file.read_text().splitlines()]


def test_changes_with_equal_results_share_a_row() -> None:
    found = ask(six())
    table = at_80_columns(found)
    rows = [effect.figures for effect in found.with_judgement("fixes", "helps")]
    assert any(rows.count(one) > 1 for one in rows)
    assert " more)" in table


def at_80_columns(found: WhatIfResult, everything: bool = False) -> str:
    out = io.StringIO()
    show(*render_whatif(found, everything), on=Console(file=out, width=80))
    return out.getvalue()


def test_change_without_effect_is_not_simulated() -> None:
    """The result of a skipped change equals the result of its simulation."""
    rows = [{"prompt_tokens": 100, "output_tokens": 5} for _ in range(3)]
    case = scenario({"name": "vllm", "max_model_len": 512}, rows)
    idle = {
        change: job
        for change, job in generate_changes(case, HERE)
        if has_no_effect(case, change) and isinstance(job, SimulationJob)
    }
    assert {change.field for change in idle} == {
        *("gpu_memory_utilization", "cudagraph_mode", "max_cudagraph_capture_size"),
        *("max_loras", "max_cpu_loras", "speculative_method"),
    }
    found = ask(case)
    simulated = {effect.change: effect.figures for effect in found.effects}
    assert {change: evaluate_job(job) for change, job in idle.items()} == {
        change: simulated[change] for change in idle
    }
    assert found.runs == 1 + len(found.effects) - len(idle)


def test_limits_on_tokens_are_not_tiny() -> None:
    engine = VllmConfig(num_gpu_blocks=500, startup_check=False)
    found = dict(_knobs(engine, set()))
    assert found["long_prefill_token_threshold"] == (64, 256, 1024)
    assert found["num_cpu_blocks"] == (500, 2000)
