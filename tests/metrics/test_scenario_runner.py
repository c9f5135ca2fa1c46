"""Tests of scenarios from end to end, and of the packaged incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.core.scheduler_protocol import Batch
from simkv.costs.cost_profile import load_profile
from simkv.metrics.run_metrics import e2e
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file, run_scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import build_scheduler
from tests.conftest import ROOT

PLAIN = """\
name: t
workload:
  burst: {num_prompts: 4, prompt_tokens: 5, output_tokens: 3}
engine: {name: mistralrs, variant: pr2034}
profile: unit-step
"""


def run(folder: Path, text: str, *overrides: str) -> dict[str, RunResult]:
    (folder / "s.yaml").write_text(text)
    return run_file(folder / "s.yaml", overrides)


def test_result_has_scenario_record_figures_and_profile(tmp_path: Path) -> None:
    result = run(tmp_path, PLAIN)["run"]
    assert result.scenario.name == "t"
    assert result.profile.name == "unit-step"
    assert result.summary["finished"] == len(result.record.requests) == 4
    assert result.notes == []
    assert result.record.isolated_s == dict.fromkeys(range(4), 3.0)


@pytest.mark.parametrize(("variant", "noted"), [("0.27.1", 0), ("0.27", 0), ("0.27.4", 1)])
def test_notes_an_unrecorded_release(tmp_path: Path, variant: str, noted: int) -> None:
    engine = f"{{name: vllm, variant: '{variant}'}}"
    text = PLAIN.replace("{name: mistralrs, variant: pr2034}", engine)
    result = run(tmp_path, text)["run"]
    assert [note for note in result.notes if "was not recorded" in note] == [
        "vLLM 0.27.4 was not recorded; simulated with the rules of 0.27.0"
    ] * noted
    assert result.scenario.engine.variant == variant


def test_variants_run_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = PLAIN + "variants: {z: {}, a: {}, m: {}}\n"
    assert list(run(tmp_path, text)) == ["z", "a", "m"]


@pytest.mark.parametrize(
    ("engine", "blocks"),
    [
        ("{name: mistralrs, variant: seed, num_gpu_blocks: 2}", 2),
        ("{name: mistralrs, variant: pr2034, num_gpu_blocks: 3}", 2),
        ("{name: fastdeploy, block_size: 32, num_blocks: 2}", 2),
    ],
)
def test_notes_requests_larger_than_the_cache(tmp_path: Path, engine: str, blocks: int) -> None:
    rows = "".join(
        f"\n    - {{prompt_tokens: {prompt}, output_tokens: {output}}}"
        for prompt, output in ((64, 1), (64, 2), (200, 9))
    )
    text = PLAIN.replace("  burst: {num_prompts: 4, prompt_tokens: 5, output_tokens: 3}", "")
    text = text.replace("workload:\n", f"workload:\n  requests:{rows}")
    text = text.replace("{name: mistralrs, variant: pr2034}", engine)
    result = run(tmp_path, text)["run"]
    (note,) = (note for note in result.notes if "do not fit" in note)
    # 64 tokens fill two blocks, and the last token of an output needs no KV
    assert note == (
        "2 requests do not fit into the KV cache: request 2 needs 7 blocks of 32 tokens, the cache "
        f"has {blocks}"
    )
    assert result.record.requests[2].outcome in (Outcome.REJECTED, Outcome.STALLED)


def test_notes_a_run_outside_the_profile_range(tmp_path: Path) -> None:
    text = PLAIN.replace("unit-step", "l4-mistralrs-pr2034").replace(
        "num_prompts: 4", "num_prompts: 20"
    )
    assert run(tmp_path, text)["run"].notes == []
    (note,) = run(tmp_path, text, "engine.max_num_seqs=20")["run"].notes
    assert (
        " % of the busy time was outside the measured range of profile l4-mistralrs-pr2034: "
        in note
    )
    assert note.endswith(": decode_seqs was 20 to 20, but was measured from 1 to 16")


def test_rejects_a_missing_profile(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"s\.yaml:5: profile: file .*mine\.json does not exist"):
        run(tmp_path, PLAIN.replace("unit-step", "mine.json"))


def test_runs_leap_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.yaml").write_text(PLAIN.replace("output_tokens: 3", "output_tokens: 300"))
    scenario = load(tmp_path / "s.yaml")["run"]
    kind, calls = type(build_scheduler(scenario.engine)), list[object]()
    schedule = kind.schedule

    def count(scheduler: Any) -> Batch:
        calls.append(scheduler)
        return schedule(scheduler)

    monkeypatch.setattr(kind, "schedule", count)
    run_scenario(scenario, tmp_path)
    assert len(calls) < 20
    run_scenario(scenario, tmp_path, leaping=False)
    assert len(calls) > 300


def test_leaping_does_not_change_figures(tmp_path: Path) -> None:
    from simkv.scenario.scenario_loader import load

    (tmp_path / "s.yaml").write_text(PLAIN.replace("output_tokens: 3", "output_tokens: 300"))
    scenario = load(tmp_path / "s.yaml")["run"]
    leaping, stepping = (run_scenario(scenario, tmp_path, leaping=on) for on in (True, False))
    assert leaping.summary == stepping.summary


# Packaged incidents


@pytest.fixture(scope="module")
def six() -> dict[str, RunResult]:
    return run_file(ROOT / "scenarios" / "mistralrs-six.yaml")


@pytest.fixture(scope="module")
def forty() -> dict[str, RunResult]:
    return run_file(ROOT / "scenarios" / "mistralrs-forty.yaml")


@pytest.fixture(scope="module")
def pressure() -> dict[str, RunResult]:
    return run_file(ROOT / "scenarios" / "mistralrs-forty-pressure.yaml")


def finishes(result: RunResult) -> list[float]:
    return [life.last_token or 0.0 for _, life in sorted(result.record.requests.items())]


def test_six_is_251_prefills_and_49_decodes_before(six: dict[str, RunResult]) -> None:
    kinds = six["before"].record.steps.kind
    assert (kinds.count("prefill"), kinds.count("decode")) == (251, 49)
    assert six["before"].summary["preemptions"] == 245
    after = six["after"].record.steps.kind
    assert (after.count("prefill"), after.count("decode")) == (6, 49)


def test_six_is_within_the_printed_error(six: dict[str, RunResult]) -> None:
    before, after = six["before"].summary, six["after"].summary
    assert before["makespan_s"] == pytest.approx(103.62, rel=0.001)
    assert before["output_throughput"] == pytest.approx(2.90, rel=0.005)
    assert after["makespan_s"] == pytest.approx(3.08, rel=0.005)
    assert after["output_throughput"] == pytest.approx(97.43, rel=0.005)
    # the end times were not used for the fit; the profile has their errors
    published = sorted([101.44, 101.83, 102.77, 102.77, 103.18, 103.62])
    errors = [a - b for a, b in zip(sorted(finishes(six["before"])), published, strict=True)]
    rms = (sum(error**2 for error in errors) / 6) ** 0.5
    assert rms == pytest.approx(load_profile("l4-mistralrs-pr2031").fit.rms_s, abs=0.01)


def test_forty_after_the_fix_starves_no_request(forty: dict[str, RunResult]) -> None:
    after = forty["after"].summary
    assert (after["starved"], after["preemptions"]) == (0, 0)
    assert after["makespan_s"] == pytest.approx(195.68, rel=0.001)
    assert after["e2e_ms"]["mean"] == pytest.approx(148_580, rel=0.002)
    assert after["fastest_e2e_s"] == pytest.approx(90.05, rel=0.001)
    assert after["slowest_e2e_s"] == pytest.approx(192.26, rel=0.001)
    latencies = [e2e(life) or 0.0 for _, life in sorted(forty["after"].record.requests.items())]
    waves = ((slice(16), 90, 94), (slice(16, 32), 181, 185), (slice(32, 40), 191, 193))
    for wave, low, high in waves:
        assert low < min(latencies[wave]) < max(latencies[wave]) < high


def test_forty_before_starves_24_only_under_the_assumption(
    forty: dict[str, RunResult],
) -> None:
    assert forty["before-assumed"].summary["starved"] >= 24
    assert forty["before-fitted"].summary["starved"] == 0
    assert forty["after-assumed"].summary["starved"] == 0


def test_forty_separates_given_fitted_and_assumed_values(forty: dict[str, RunResult]) -> None:
    provenance = forty["after"].scenario.provenance
    assert provenance.given
    assert provenance.fitted
    assert any("before-assumed" in line for line in provenance.assumed)


def test_pressure_shows_every_kind_of_outcome(
    pressure: dict[str, RunResult],
) -> None:
    variants = {result.scenario.engine.variant for result in pressure.values()}
    assert len(variants) == 7
    assert len(pressure) == 14
    verdicts = {name: result.summary["verdict"] for name, result in pressure.items()}
    assert verdicts["rules-pr2034"] == verdicts["pr2034"] == "engine died"
    assert "livelock" in verdicts.values()
    assert pressure["rules-bucketed"].summary["preemptions"] > 0
    for result in pressure.values():
        assert sum(result.summary[outcome.value] for outcome in Outcome) == 40


def test_replicas_do_not_share_a_custom_scheduler(tmp_path: Path) -> None:
    scenario = run(tmp_path, PLAIN + "fleet: {replicas: 2}\n")["run"].scenario
    own = build_scheduler(scenario.engine)
    assert run_scenario(scenario, tmp_path, scheduler=own).summary["finished"] == 4
    assert own.free_blocks == own.num_blocks
    assert not own.schedule()


def test_horizon_before_any_replica_is_ready(tmp_path: Path) -> None:
    fleet = """\
horizon: 5
fleet:
  cold_start: 9.0
  start_cold: true
  autoscale: {target: 9.0, max_replicas: 4}
  failures: [{replica: 0, at: 0.5}]
"""
    result = run(tmp_path, PLAIN + fleet)["run"]
    assert {life.outcome for life in result.record.requests.values()} == {Outcome.CUT_OFF}
