"""Tests of complete searches: policies, knobs, proposals, and the evaluation of the winner."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import simkv
from simkv.core.errors import InputError
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import ENGINES
from simkv.study.evolve import external_proposals
from simkv.study.evolve.evolution import Evolution, EvolutionRequest, run_evolution
from simkv.study.evolve.evolution_result import (
    describe_policy,
    summarize_evolution,
    write_evolution,
)
from simkv.study.evolve.fitness import FigureGoal, parse_goals
from simkv.study.evolve.policy_search import make_policy_candidate, prune_policy
from simkv.study.evolve.tournament import Tournament
from simkv.study.evolve.trial_split import (
    EvaluationCondition,
    TrialScenario,
    build_evaluation_conditions,
    split_trials,
)
from simkv.study.evolve.winner_evaluation import (
    Improvement,
    WinnerEvaluation,
    compute_mean_interval,
)
from simkv.study.job_runner import open_pooled_runner
from tests.study.evolve.small_scenarios import write

GOAL = FigureGoal("ttft_ms.mean", more_is_better=False)


def search(folder: Path, budget: int = 25, **more: Any) -> EvolutionRequest:
    asked = {"train": 2, "final": 2, "test": 3, "seed": 1, "profile_error": 0.1} | more
    objectives = asked.pop("objectives", ("ttft_ms.mean",))
    return EvolutionRequest((write(folder),), objectives, budget, **asked)


def run(asked: EvolutionRequest, folder: Path) -> Evolution:
    with open_pooled_runner(folder / "points.jsonl", jobs=1) as runner:
        return run_evolution(asked, runner, folder)


# Objectives


def test_loss_is_relative_to_shipped_value() -> None:
    assert GOAL.loss(9.0, 10.0) == pytest.approx(-0.1)
    assert FigureGoal("jain_index", more_is_better=True).loss(0.6, 0.5) == pytest.approx(-0.2)
    assert GOAL.loss(3.0, 0.0) == 3.0
    assert GOAL.loss(None, 4.0) == 10.0
    assert (GOAL.loss(4.0, None), GOAL.loss(None, None)) == (-10.0, 0.0)


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ((), "missing"),
        (("ttft.p99",), "unknown metric"),
        (("ttft_ms.p99:up",), "expected ttft_ms.p99:min or"),
        (("goodput",), "requires --goodput"),
        (("jain_index", "jain_index:max"), "specified twice"),
    ],
)
def test_rejects_invalid_objectives(asked: tuple[str, ...], wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        parse_goals(asked, {})


def test_goals_know_better_direction() -> None:
    found = parse_goals(("jain_index", "recompute_tax", "starved", "makespan_s:max"), {})
    assert [goal.more_is_better for goal in found] == [True, False, False, True]


# Held-out trials


def test_evaluation_uses_held_out_seeds(tmp_path: Path) -> None:
    scenario = load(write(tmp_path), ["engine.num_gpu_blocks=64"])["run"]
    ground = split_trials([(scenario, tmp_path)], 3, 2, 4)
    trials = (*ground.train, *ground.final, *ground.test)
    seeds = {one.scenario.workload.arrivals.seed for one in trials}  # type: ignore[union-attr]
    parts = ground.train, ground.final, ground.test
    assert ([len(part) for part in parts], len(seeds)) == ([3, 2, 4], 9)
    ways, notes = build_evaluation_conditions(ground, 0.1)
    assert (len(ways), notes) == (7, [])
    blocks = {one.description: one.trials[0].scenario.engine.num_gpu_blocks for one in ways}  # type: ignore[attr-defined]
    assert (blocks["as configured"], blocks["cache x 1.25"]) == (64, 80)


def test_notes_rejected_cache_size(tmp_path: Path) -> None:
    """75 % of 33 blocks are too few for a request of max_model_len tokens."""
    scenario = load(write(tmp_path))["run"]
    _, notes = build_evaluation_conditions(split_trials([(scenario, tmp_path)], 1, 1, 1), None)
    assert any("cache x 0.75" in note and "max_model_len" in note for note in notes)


def test_trace_windows_are_consecutive(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{10 + i % 7},{3 + i % 5}" for i in range(200))
    (tmp_path / "t.csv").write_text(f"arrival,prompt_tokens,output_tokens\n{rows}\n")
    scenario = load(write(tmp_path, workload={"trace": "t.csv", "rate_scale": 2.0}))["run"]
    ground = split_trials([(scenario, tmp_path)], 2, 1, 3)
    windows = [one.scenario.workload for one in (*ground.train, *ground.final, *ground.test)]
    sizes = [window.size for window in windows]
    assert sum(sizes) >= 199
    assert max(sizes) - min(sizes) <= 1
    starts = [window.start for window in windows]
    assert starts == sorted(starts)
    assert len(set(starts)) == 6


def test_deterministic_workload_has_no_held_out_trials(tmp_path: Path) -> None:
    burst = {"burst": {"num_prompts": 9, "prompt_tokens": 20, "output_tokens": 5}}
    scenario = load(write(tmp_path, workload=burst))["run"]
    ground = split_trials([(scenario, tmp_path)], 2, 1, 3)
    assert (ground.held_out, ground.final) == (None, ())


# Evaluation


def test_interval_is_student_t() -> None:
    assert compute_mean_interval([0.1]) == (None, None)
    assert compute_mean_interval([0.1, 0.2, 0.3]) == pytest.approx((-0.0484, 0.4484), abs=1e-4)


def judged(low: float, high: float, before: float = 0, after: float = 0) -> WinnerEvaluation:
    gain = Improvement(GOAL, (low + high) / 2, low, high, 1.0, 1.0)
    return WinnerEvaluation(EvaluationCondition("as configured", ()), (gain,), (before, after))


def test_winner_must_hold_under_all_conditions() -> None:
    assert judged(0.1, 0.2).holds
    assert not judged(-0.1, 0.2).holds
    assert not judged(0.1, 0.2, after=1).holds
    assert judged(-0.1, 0.2, before=3, after=1).holds
    assert not judged(-0.2, -0.1, before=3, after=1).holds
    assert not replace(judged(0.1, 0.2), why="it broke a law").holds


# Policies


def test_policy_search_writes_winner_scenario(tmp_path: Path) -> None:
    pytest.importorskip("deap")
    found = run(search(tmp_path), tmp_path)
    assert (found.tried, len(found.final)) == (23, 2)
    assert found.winner.loss[0] < 0
    assert found.winner == min(found.final, key=lambda one: one.score)
    files = write_evolution(found, tmp_path)
    assert files == ["candidates.csv", "evolve.md", "winner.yaml"]
    figures = simkv.run(tmp_path / "winner.yaml").figures.loc["ttft_ms.mean"]
    evolved = next(one for one in found.standings if one.candidate == found.winner.candidate)
    assert figures["evolved"] == evolved.values[0]["ttft_ms.mean"]
    assert figures["shipped"] == found.standings[0].values[0]["ttft_ms.mean"]
    words = (tmp_path / "evolve.md").read_text()
    assert words.count(": does NOT hold") == sum(not one.holds for one in found.evaluations)
    assert ("The improvement does NOT hold" in words) != found.holds
    lines = (tmp_path / "points.jsonl").read_text()
    again = run(search(tmp_path), tmp_path)
    assert again == found
    assert (tmp_path / "points.jsonl").read_text() == lines
    assert summarize_evolution(again) == summarize_evolution(found)


def test_prunes_unneeded_parts_of_winner(tmp_path: Path) -> None:
    scenario = load(write(tmp_path))["run"]
    ground = split_trials([(scenario, tmp_path)], 1, 1, 1)
    with open_pooled_runner(None, jobs=1) as runner:
        tournament = Tournament(ground.train, (GOAL,), {}, runner)
        tournament.start()
        long = "waiting_order = prompt_tokens\nchunk = 9000\nadmit = 1"
        (entry,) = tournament.add([make_policy_candidate(long)])
        assert prune_policy(tournament, entry).candidate == make_policy_candidate(
            "waiting_order = prompt_tokens"
        )


def test_several_objectives_give_front(tmp_path: Path) -> None:
    pytest.importorskip("deap")
    asked = search(tmp_path, objectives=("ttft_ms.mean", "ttft_ms.p99"), random=True, seed=4)
    found = run(asked, tmp_path)
    for one in found.front:
        better = [
            x for x in found.standings if all(map(lambda a, b: a < b, x.fitness, one.fitness))
        ]
        assert better == []
    assert "Best trade-offs (no candidate is better in every objective)" in summarize_evolution(
        found
    )


def test_describes_policy() -> None:
    lines = describe_policy("alike = 0\nadmit = free > 0.1", ENGINES["mistralrs"].policy_hooks)
    assert "  requests with equal values may decode in the same step: all equal" in lines
    assert "free: fraction of the blocks that are free" in lines
    assert lines[-1].startswith("as shipped: waiting_order (")


def test_rejects_engine_without_policy_hooks(tmp_path: Path) -> None:
    engine = {"name": "sglang", "max_total_num_tokens": 4096}
    asked = EvolutionRequest((write(tmp_path, engine=engine),), ("ttft_ms.mean",), 5)
    with pytest.raises(
        InputError,
        match="engine sglang does not support custom policies; engines that do: mistralrs and vllm",
    ):
        run(asked, tmp_path)


# Knobs


def test_knob_search_resumes_study(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    over = ("engine.max_num_seqs=1..12", "engine.watermark=0,0.1,0.3")
    first = run(search(tmp_path, 6, over=over), tmp_path)
    assert first.tried <= 6  # the same setting may be requested twice
    store = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
    )
    (study,) = (optuna.load_study(study_name=None, storage=store),)
    assert len(study.trials) == 6
    more = run(search(tmp_path, 11, over=over), tmp_path)
    assert more.standings[: len(first.standings)] == first.standings
    study = optuna.load_study(study_name=None, storage=store)
    assert len(study.trials) == 11
    assert {path for path, _ in more.winner.candidate.change} == {
        "engine.max_num_seqs",
        "engine.watermark",
    }


# Code

PROPOSER = '''
import sys
prompt = sys.stdin.read()
assert "ttft_ms.mean (lower is better)" in prompt and "wait ledger" in prompt
first = "# Proposal 1 of" in prompt
assert first or "rejected" in prompt
print("Here it is:")
print("```python")
if first:
    print("import nonsense")
else:
    print("""from simkv.custom import PolicyRequest, CustomVllmConfig, CustomVllmScheduler


class Proposed(CustomVllmScheduler):
    config: CustomVllmConfig

    def waiting_order(self, r: PolicyRequest) -> float:
        return r.prompt_tokens
""")
print("```")
'''


def test_runs_external_proposals(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(PROPOSER)
    asked = search(
        tmp_path, 2, propose=f"{sys.executable} {tmp_path / 'p.py'}", train=1, final=1, test=1
    )
    with override_trust(True):
        found = run(asked, tmp_path)
        write_evolution(found, tmp_path)
    assert [bool(one.why) for one in found.standings] == [False, True, False]
    assert "nonsense" in found.standings[1].why
    assert found.winner.loss[0] < 0
    assert (tmp_path / "0002.py").read_text() == (tmp_path / "proposals" / "0002.py").read_text()
    with pytest.raises(InputError, match="--trust"):
        simkv.run(tmp_path / "winner.yaml")


def test_proposer_without_output_ends_search(tmp_path: Path) -> None:
    for command, told_so in (
        ("false", "ended with exit code 1"),
        ("true", "exit code 0: no output on standard error"),
        ("no-such", "no-such"),
    ):
        asked = search(tmp_path, 2, propose=command)
        with pytest.raises(InputError, match=told_so), override_trust(True):
            run(asked, tmp_path)


def test_proposal_inherits_supported_knobs(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from simkv.custom import CustomScheduler\n\n\nclass A(CustomScheduler):\n    pass\n"
    )
    scenario = load(write(tmp_path))["run"]
    with override_trust(True):
        found = external_proposals.make_code_candidate(file, TrialScenario("", scenario, tmp_path))
    assert not isinstance(found, str)
    change = found.change[0][1]
    assert {k: change[k] for k in ("max_num_seqs", "num_blocks", "block_size")} == {
        "max_num_seqs": 4,
        "num_blocks": 32,
        "block_size": 16,
    }
    assert "variant" not in change


def test_python_api_matches_command(tmp_path: Path) -> None:
    pytest.importorskip("deap")
    few = {"train": 1, "final": 1, "test": 1, "jobs": 1}
    path = write(tmp_path)
    ours = simkv.evolve(path, objectives=["ttft_ms.mean"], budget=5, folder=tmp_path / "a", **few)
    assert len(ours.candidates) == 6
    assert ours.holds == ours.evolution.holds
    written = ours.write(tmp_path / "b")
    assert (tmp_path / "b" / "evolve.md").read_text() == f"{ours}\n"
    assert [file.name for file in written] == ["candidates.csv", "evolve.md", "winner.yaml"]
    assert (tmp_path / "a" / "points.jsonl").is_file()
    with pytest.raises(TypeError, match="budgets"):
        simkv.evolve(path, objectives=["ttft_ms.mean"], budgets=5)
    with pytest.raises(InputError, match="trust=True"):
        simkv.evolve(path, objectives=["ttft_ms.mean"], propose="cat", jobs=1)
