from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.vllm.config import VllmConfig
from simkv.study.whatif import shrunk_scenario
from simkv.study.whatif.outcome_predicate import RunCondition, parse_condition
from simkv.study.whatif.trial_evaluation import (
    Evaluator,
    RunFigures,
    evaluate_job,
    make_trial_job,
)
from simkv.study.whatif.workload_rows import list_requests
from simkv.study.whatif.workload_shrinking import ShrunkScenario, shrink
from simkv.workload.workload_section import Workload
from tests.laws.random_scenarios import ENGINES, scenarios
from tests.study.whatif.known_verdicts import (
    overload,
    queue_loop,
    scenario,
    six,
)

HERE = Path()


def lpm_cold(root: Path) -> Scenario:
    return load(root / "scenarios" / "sglang-31954-lpm-cold.yaml")["before"]


def smallest(scenario: Scenario, keep: str, **options: Any) -> ShrunkScenario:
    return shrink(
        scenario, parse_condition(keep), Evaluator(HERE, **options.pop("with_", {})), **options
    )


def with_requests(scenario: Scenario, rows: list[Any]) -> Scenario:
    return scenario.model_copy(update={"workload": Workload(requests=rows)})


def one_less(scenario: Scenario) -> Iterator[RunFigures]:
    """Yield the results of runs in which one request is missing, for each request."""
    rows = scenario.workload.requests
    assert rows is not None
    for index in range(len(rows) if len(rows) > 1 else 0):
        yield evaluate_job(
            make_trial_job(with_requests(scenario, rows[:index] + rows[index + 1 :]), HERE)
        )


def check(found: ShrunkScenario, wanted: RunCondition) -> None:
    """Check the properties of every shrunk scenario."""
    assert evaluate_job(make_trial_job(found.scenario, HERE)) == found.after
    assert wanted.is_met(found.before)
    assert wanted.is_met(found.after)
    assert found.minimal
    assert not any(wanted.is_met(figures) for figures in one_less(found.scenario))
    rows = found.scenario.workload.requests
    assert rows is not None
    assert len(rows) == len(found.numbers) == len(set(found.numbers))
    assert len(rows) <= found.count_before_simplifying <= len(found.before.endings)
    if found.served_in_isolation:
        for row in rows:
            alone = row.model_copy(
                update={"arrival": 0.0, "segments": None, "hash_ids": None}
            ).model_copy(update={"prefix_group": None, "prefix_tokens": 0})
            figures = evaluate_job(make_trial_job(with_requests(found.scenario, [alone]), HERE))
            assert figures.verdict == "served"
            assert not wanted.is_met(figures)


def test_shrinks_overload_to_minimal_requests() -> None:
    """With one slot, 5 steps per request and timeouts of 31 s, six requests are served; the seventh
    is not.
    """
    found = smallest(overload(), "starved", knobs=False)
    check(found, parse_condition("starved"))
    assert found.numbers == (0, 1, 2, 3, 4, 5, 6)
    assert found.count_before_simplifying == 7
    assert found.knobs == ()
    assert found.served_in_isolation


def test_removes_all_unneeded_requests() -> None:
    """The third request does not contribute to the crash of the engine."""
    found = smallest(queue_loop(), "stalled", knobs=False)
    check(found, parse_condition("engine died"))
    assert found.numbers == (0, 1)
    assert found.scenario.engine == queue_loop().engine


def test_reduces_engine_sizes_that_matter() -> None:
    found = smallest(queue_loop(), "engine died")
    check(found, parse_condition("engine died"))
    engine = asdict(found.scenario.engine)
    assert [name for name, _, _ in found.knobs] == ["num_gpu_blocks"]
    assert engine["num_gpu_blocks"] < 25
    assert engine["max_num_seqs"] == 16


def test_smaller_cache_reduces_length_limit() -> None:
    """vLLM starts only if a sequence of max_model_len tokens fits."""
    rows = [{"prompt_tokens": 100, "output_tokens": 900} for _ in range(4)]
    chosen = scenario({"name": "vllm", "num_gpu_blocks": 130, "max_model_len": 2000}, rows)
    found = smallest(chosen, "preemptions>=1")
    check(found, parse_condition("preemptions>=1"))
    engine = found.scenario.engine
    assert isinstance(engine, VllmConfig)
    assert [name for name, _, _ in found.knobs] == ["num_gpu_blocks", "max_model_len"]
    assert engine.num_gpu_blocks < 30
    assert engine.max_model_len <= (engine.num_gpu_blocks - 1) * engine.block_size
    assert len(found.numbers) == 2


def test_keeps_irrelevant_memory_size() -> None:
    """Requests of unequal length preempt each other with any amount of memory."""
    found = smallest(six(), "preemptions>=1")
    check(found, parse_condition("preemptions>=1"))
    assert len(found.numbers) == 2
    assert found.knobs == ()


def test_preserves_victims_and_cause(root: Path) -> None:
    """A request without cached blocks waits behind requests with cached blocks. The number of
    requests becomes minimal, and the first request remains the victim.
    """
    found = smallest(lpm_cold(root), "starved")
    check(found, parse_condition("starved"))
    rows = found.scenario.workload.requests
    assert rows is not None
    cold = found.numbers.index(1)
    assert found.after.endings[cold].outcome == "starved"
    assert rows[cold].prefix_group is None
    assert all(row.prefix_group == "warm" for i, row in enumerate(rows) if i != cold)
    assert len(rows) < 14


def test_unservable_request_suffices_alone() -> None:
    rows = [{"prompt_tokens": n, "output_tokens": 3} for n in (20, 3000, 20, 20)]
    engine = {"name": "mistralrs", "block_size": 8, "num_gpu_blocks": 20}
    found = smallest(scenario(engine, rows), "rejected")
    check(found, parse_condition("rejected"))
    assert found.numbers == (1,)
    assert not found.served_in_isolation


def test_shrinking_is_deterministic(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = smallest(lpm_cold(root), "starved")
    assert smallest(lpm_cold(root), "starved") == once
    monkeypatch.setattr(Evaluator, "POOL_PAYS", -1.0)
    monkeypatch.setattr(Evaluator, "POOL_LEAST", -1.0)
    with Evaluator(HERE, workers=2) as beside:
        assert shrink(lpm_cold(root), parse_condition("starved"), beside) == once


def test_closed_loop_arrivals_are_listed() -> None:
    """Eight requests at a time: the ninth and tenth requests are sent after two replies, and wait
    behind six.
    """
    burst = {"num_prompts": 10, "prompt_tokens": 10, "output_tokens": 5}
    chosen = Scenario.model_validate(
        {
            "name": "closed",
            "workload": {"burst": burst, "max_concurrency": 8},
            "engine": {"name": "mistralrs", "max_num_seqs": 1},
            "profile": "unit-step",
            "timeout": 38.0,
        }
    )
    rows = list_requests(chosen, HERE)
    assert [row.arrival for row in rows.values()] == [0.0] * 8 + [5.0, 10.0]
    found = smallest(chosen, "starved")
    check(found, parse_condition("starved"))
    assert len(found.numbers) == 8
    text = shrunk_scenario.write_shrunk(
        found, parse_condition("starved"), "simkv shrink x", HERE, None
    )
    assert "# In the original scenario, arrivals depend on answers; this file contains the" in text


def test_limit_on_runs_still_shows_verdict(root: Path) -> None:
    found = smallest(lpm_cold(root), "starved", with_={"most_runs": 6})
    assert not found.minimal
    assert found.runs == 6
    assert evaluate_job(make_trial_job(found.scenario, HERE)) == found.after
    assert parse_condition("starved").is_met(found.after)


def test_rejects_absent_verdict() -> None:
    with pytest.raises(
        InputError, match=r"does not meet the condition 'lost'; its result is starved \(4 of 10"
    ):
        smallest(overload(), "lost")
    with pytest.raises(InputError, match=r"its result is preemptions 0 \(starved\)"):
        smallest(overload(), "preemptions>=1")


@settings(max_examples=12)
@given(data=st.data())
def test_shrinks_every_known_verdict(data: st.DataObject) -> None:
    chosen = data.draw(scenarios(*data.draw(st.sampled_from(ENGINES))))
    before = evaluate_job(make_trial_job(chosen, HERE))
    assume(before.verdict != "served")
    check(smallest(chosen, before.verdict), parse_condition(before.verdict))


# New scenario file


def test_written_file_shows_verdict(tmp_path: Path) -> None:
    found = smallest(queue_loop(), "stalled")
    out = tmp_path / "small.yaml"
    text = shrunk_scenario.write_shrunk(
        found, parse_condition("stalled"), "simkv shrink x", HERE, out
    )
    assert out.read_text() == text
    assert list(tmp_path.iterdir()) == [out]
    again = load(out)
    assert list(again) == ["run"]
    assert again["run"].engine == found.scenario.engine
    assert evaluate_job(make_trial_job(again["run"], tmp_path)) == found.after
    assert again["run"].expect["run"].verdict == "engine died"
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments[0] == "# simkv run small.yaml"
    assert comments[1].startswith("# Created by: simkv shrink x (simkv ")
    assert any(line.startswith("# Result before: engine died (") for line in comments)
    assert "# Requests: 3 before, 2 now (originally numbers 0 to 1)." in comments


def test_header_reports_seed() -> None:
    drawn = Scenario.model_validate(
        {
            "name": "drawn",
            "workload": {
                "arrivals": {
                    "num_prompts": 12,
                    "request_rate": 5.0,
                    "prompt_tokens": 10,
                    "output_tokens": 5,
                    "seed": 41,
                }
            },
            "engine": {"name": "mistralrs", "max_num_seqs": 1},
            "profile": "unit-step",
            "timeout": 21.0,
        }
    )
    found = smallest(drawn, "starved")
    check(found, parse_condition("starved"))
    text = shrunk_scenario.write_shrunk(
        found, parse_condition("starved"), "simkv shrink x", HERE, None
    )
    assert "# The requests were sampled with seed 41; this file has no random part." in text


def test_profile_path_is_relative_to_new_file(root: Path, tmp_path: Path) -> None:
    folder = root / "scenarios"
    chosen = load(folder / "sglang-32549-decode-starved.yaml")["before"]
    wanted = parse_condition("longest_stall_s>=17")
    found = shrink(chosen, wanted, Evaluator(folder, most_runs=8))
    out = tmp_path / "small.yaml"
    shrunk_scenario.write_shrunk(found, wanted, "simkv shrink x", folder, out)
    assert evaluate_job(make_trial_job(load(out)["run"], tmp_path)) == found.after
    assert "include it in a bug report" in out.read_text()


def test_failure_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = smallest(queue_loop(), "stalled")
    out = tmp_path / "small.yaml"
    out.write_text("precious")
    wrong = replace(found, after=found.before)
    with pytest.raises(AssertionError, match="the new scenario file gives another result"):
        shrunk_scenario.write_shrunk(wrong, parse_condition("stalled"), "simkv shrink x", HERE, out)
    assert out.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(InputError, match="cannot be written"):
        shrunk_scenario.write_shrunk(
            found, parse_condition("stalled"), "x", HERE, tmp_path / "no" / "small.yaml"
        )


def test_prints_nothing() -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        smallest(overload(), "starved")
    assert not said.getvalue()


def test_checks_victims_once_per_round() -> None:
    rows = [{"prompt_tokens": 10, "output_tokens": 5, "arrival": 0.137 * n} for n in range(10)]
    chosen = with_requests(overload(), rows).model_copy(update={"engine_ready": 0.25})
    found = smallest(chosen, "starved")
    check(found, parse_condition("starved"))
    assert found.runs <= 85  # 81 runs; a check at every step needed 94
