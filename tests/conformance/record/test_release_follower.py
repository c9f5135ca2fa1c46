"""Tests of ``follow_release``: it detects planted changes of a scheduler.

The recorded scheduler is simkv's own; ``test_release_sources`` records real schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from math import comb
from pathlib import Path
from typing import Any

import pytest

from simkv.conformance.decision_replay import check_trace, replay_decisions
from simkv.conformance.decision_trace import (
    DecisionTrace,
    ending_kind,
    pack_traces,
    read_trace,
)
from simkv.conformance.record import case_run, case_shrinking
from simkv.conformance.record import release_follower as following
from simkv.conformance.record import rule_inference as known
from simkv.conformance.record.case_run import CaseRun
from simkv.conformance.record.engine_drivers import (
    ENGINE_DRIVERS,
    interleave_kinds,
    prepare_case,
)
from simkv.conformance.record.follow_report import headline, render_follow_report
from simkv.conformance.record.recording_case import RecordingCase
from simkv.conformance.record.recording_selection import choose, recordings_by_rule
from simkv.conformance.record.release_follower import FollowResult, follow
from simkv.conformance.record.rule_inference import (
    MAX_CHANGED_RULES,
    can_show,
    distinct_releases,
    find_mismatch,
    observable_rules,
    rule_combinations,
)
from simkv.conformance.record.vllm_cases import CASE_SCHEMA, case_names, make_case
from simkv.core.errors import InputError
from simkv.core.recording_format import RecordingLine
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.request_state import FcfsQueue, RequestState
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.spec import VLLM
from simkv.schedulers.vllm.versions import MINORS, RULES, find_rules
from tests.conformance.recordings import committed

Build = Callable[[VllmConfig], VllmScheduler]


def recorded(build: Build) -> following.RecordCase:
    """Return a function that records a simulated scheduler as if it were a release."""

    def record(case: RecordingCase, name: str) -> DecisionTrace:
        knobs = asdict(case.config)
        for knob in ("async_scheduling", "scheduler_reserve_full_isl", "enable_prefix_caching"):
            if knobs[knob] is None:
                knobs[knob] = getattr(find_rules(case.config.variant), knob)
        header = {"variant": case.config.variant, "config": knobs, "requests": case.requests}
        header |= {"format": 1, "engine": "vllm", "aborts": case.aborts}
        lines = list(replay_decisions(replace(VLLM, build=build), header, 0))
        closing = lines.pop() if "truncated" in lines[-1] else None
        if closing:
            raised = closing["ending"] == "raised"
            why = f"raised {closing['why']}" if raised else "no progress"
            closing = {"truncated": True, "why": why}
        return DecisionTrace(name, header, lines, closing)

    return record


def random_cases(count: int, version: str = "0.33.0") -> dict[str, RecordingCase]:
    """Return random cases without KV in host memory or from other replicas.

    Other scheduler classes make the decisions of these cases.
    """
    names = [
        name for name in case_names(version, count) if not name.startswith(("tier", "disk", "pd"))
    ]
    return {name: make_case(version, name) for name in names}


class AppendingQueue(FcfsQueue):
    put_back = FcfsQueue.add


class Planted(VllmScheduler):
    """A scheduler with one planted change; ``what`` selects the change."""

    what = ""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        if self.what == "order" and config.policy == "fcfs":
            self.waiting = AppendingQueue()
        self._max_tokens -= self.what == "budget"
        self.memory.watermark += self.what == "watermark"

    def _threshold(self) -> int:
        threshold = super()._threshold()
        return threshold + (threshold > 0 and self.what == "threshold")

    def _victim(self) -> RequestState:
        return next(iter(self.running.values())) if self.what == "victim" else super()._victim()


@pytest.fixture
def few_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few rules and few smaller cases, to save time."""
    monkeypatch.setitem(
        known.OBSERVABLE_RULES,
        "vllm",
        ("reuses_uncached_first", "continues_after_self_preemption", "skip_blocked"),
    )
    monkeypatch.setattr(case_shrinking, "MAX_TRIES", 40)


@pytest.mark.parametrize("what", ["order", "budget", "watermark", "victim", "threshold"])
def test_a_planted_change_is_detected(
    what: str, monkeypatch: pytest.MonkeyPatch, few_rules: None
) -> None:
    monkeypatch.setattr(Planted, "what", what)
    found = follow("vllm", CASE_SCHEMA, random_cases(30), recorded(Planted))
    assert not found.known
    assert found.unexplained is not None
    small, first = found.unexplained.trace, random_cases(30)[found.unexplained.name]
    assert len(small.header["requests"]) <= len(first.requests)
    for rules in distinct_releases("vllm").values():
        assert find_mismatch(small, rules) is not None
    page = render_follow_report("vLLM 0.34.0", "0.33.0", found)
    assert page.startswith("# vLLM 0.34.0 differs from every combination of known rules\n")
    assert "| field | recorded | simulated |" in page
    at = next(s for s in small.steps if str(s["step"]) == found.unexplained.difference.step)
    assert all(at[name] == value for name, value in found.unexplained.difference.recorded.items())


@pytest.mark.parametrize("version", ["0.33.0", "0.28.0", "0.11.0"])
def test_an_unchanged_release_is_known(version: str) -> None:
    found = follow("vllm", CASE_SCHEMA, random_cases(8, version), recorded(VllmScheduler))
    same = {
        name
        for name, rules in distinct_releases("vllm").items()
        if _seen(rules) == _seen(RULES[version])
    }
    assert same <= {*found.like}
    assert found.known
    assert headline(f"vLLM {version}", "0.33.0", found).startswith(
        f"vLLM {version} uses the rules of 0."
    )
    assert found.unexplained is found.broken is None


def test_finds_new_combinations_of_rules(few_rules: None) -> None:
    rules = replace(RULES["0.33.0"], reuses_uncached_first=False)
    found = follow(
        "vllm", CASE_SCHEMA, random_cases(24), recorded(lambda config: VllmScheduler(config, rules))
    )
    assert [*found.changed] == [{"reuses_uncached_first": False}]
    assert not found.known
    assert headline("vLLM 0.34.0", "0.33.0", found).endswith(
        "new rules, namely the rules of 0.33.0 with `reuses_uncached_first: false`"
    )


def test_reports_a_case_that_no_release_reproduces() -> None:
    flipped = replace(RULES["0.33.0"], reuses_uncached_first=False)

    def mixed(config: VllmConfig) -> VllmScheduler:
        return VllmScheduler(config, flipped if config.variant == "0.33.0" else None)

    # A combination of rules reproduces the first case, and a release the second.
    names = {"rand-035": "0.33.0", "spec-011": "0.16.0"}
    cases = {name: make_case(version, name) for name, version in names.items()}
    found = follow("vllm", CASE_SCHEMA, cases, recorded(mixed))
    assert found.unexplained is not None
    assert found.unexplained.name == "rand-035"
    assert find_mismatch(found.unexplained.trace, RULES[found.unexplained.nearest]) is not None


def test_a_case_shows_only_rules_whose_settings_it_has() -> None:
    record = recorded(VllmScheduler)
    config = VllmConfig(block_size=4, num_gpu_blocks=9, max_model_len=32, max_num_seqs=8)
    requests = random_cases(1)["rand-000"].requests[:1]
    shown = observable_rules(record(RecordingCase(config, requests), "fcfs"))
    assert "reuses_uncached_first" in shown
    assert not {
        "continues_after_self_preemption",
        "applies_both_budgets",
        "allows_large_state_blocks",
    } & {*shown}
    urgent = replace(config, policy="priority", kv_cache_groups=(0, 8), startup_check=False)
    shown = observable_rules(record(RecordingCase(urgent, requests), "priority"))
    assert {
        "continues_after_self_preemption",
        "reuses_uncached_windows_first",
        "allows_large_state_blocks",
    } <= {*shown}


def test_reports_a_release_that_cannot_be_run() -> None:
    def broken(case: RecordingCase, name: str) -> DecisionTrace:
        raise AttributeError("missing")

    found = follow("vllm", CASE_SCHEMA, random_cases(2), broken)
    assert found == FollowResult(0, 0, broken=found.broken)
    expected = r"rand-000: AttributeError: missing \(test_release_follower\.py:\d+\)"
    assert re.fullmatch(expected, found.broken or "")
    assert headline("vLLM 0.34.0", "0.33.0", found).startswith(
        "vLLM 0.34.0 cannot be run: rand-000: "
    )


def test_an_unknown_version_has_the_settings_of_the_newest_release() -> None:
    newest = next(iter(MINORS.values()))
    assert make_case("0.99.0", "rand-200").config.variant == newest
    assert make_case("0.27.1", "rand-200").config.variant == "0.27.1"
    assert make_case("0.99.0", "rand-200") != make_case("0.98.0", "rand-200")


def test_no_further_case_is_recorded_after_the_time_limit(few_rules: None) -> None:
    found = follow("vllm", CASE_SCHEMA, random_cases(9), recorded(VllmScheduler), time_limit=0.0)
    assert found.cases == 1
    assert follow("vllm", CASE_SCHEMA, random_cases(9), recorded(VllmScheduler)).cases > 5


def test_kinds_of_cases_alternate() -> None:
    names = interleave_kinds(case_names("0.33.0", 40))
    kinds = {name.split("-")[0] for name in names}
    assert sorted(names) == sorted(case_names("0.33.0", 40))
    assert {name.split("-")[0] for name in names[: len(kinds)]} == kinds


def test_unknown_version_has_no_settings_that_its_source_lacks(tmp_path: Path) -> None:
    (tmp_path / "vllm/v1/core/sched").mkdir(parents=True)
    (tmp_path / "vllm/config.py").write_text("class CacheConfig:\n    block_size: int = 16\n")
    scheduler = tmp_path / "vllm/v1/core/sched/scheduler.py"
    scheduler.write_text("use(config.policy, config.max_num_batched_tokens)\n")
    driven = ENGINE_DRIVERS["vllm"]
    names = [f"rand-{number}" for number in range(200, 240)]
    made = [prepare_case(driven, "0.99.0", name, tmp_path).config for name in names]
    whole = [make_case("0.99.0", name).config for name in names]
    assert {config.watermark for config in whole} > {0.0}
    assert {config.watermark for config in made} == {0.0}
    assert {config.policy for config in made} == {"fcfs", "priority"}
    assert prepare_case(driven, "0.33.0", names[0], tmp_path) == make_case("0.33.0", names[0])


def test_every_combination_of_rules_is_tried_once() -> None:
    tried = [tuple(sorted(changes)) for changes, _ in rule_combinations("vllm", RULES["0.33.0"])]
    rules = len(known.OBSERVABLE_RULES["vllm"])
    assert (
        len(tried) == len({*tried}) == sum(comb(rules, i) for i in range(1, MAX_CHANGED_RULES + 1))
    )
    assert len(tried[0]) == 1
    assert len(tried[-1]) == MAX_CHANGED_RULES


def test_a_written_recording_is_read_back(tmp_path: Path) -> None:
    trace = recorded(VllmScheduler)(make_case("0.33.0", "gone-201"), "gone-201")
    file = tmp_path / "gone-201.jsonl.gz"
    file.write_bytes(pack_traces([trace]))
    assert check_trace(read_trace(file)).difference is None
    assert read_trace(file).steps == trace.steps


def test_selected_recordings_show_every_rule() -> None:
    version = "0.24.0"
    traces = {recording.case: recording.trace() for recording in committed("vllm", version)}
    rules, seen = (
        find_rules(version),
        [r for r in known.OBSERVABLE_RULES["vllm"] if can_show(version, r)],
    )
    kept = choose(rules, seen, traces)
    assert len(kept) <= len(traces)
    assert all(recordings_by_rule(rules, seen, {name: traces[name] for name in kept}).values())
    with pytest.raises(
        InputError, match=r"no recorded case covers .*keeps_position.*; record more"
    ):
        choose(rules, seen, dict(list(traces.items())[:2]))


def _seen(rules: Any) -> list[bool]:
    return [getattr(rules, rule) for rule in known.OBSERVABLE_RULES["vllm"]]


class Endless(CaseRun):
    """A scheduler whose first step never ends."""

    def arrive(self, request: RecordingLine) -> None: ...

    def abort(self, number: int) -> None: ...

    def iterate(self, gone: list[int]) -> tuple[RecordingLine, int]:
        while True:
            gone.clear()


def test_a_step_that_never_ends_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_run, "STEP_SECONDS", 0.05)
    (closing,) = Endless(make_case("0.33.0", "rand-000")).lines()
    assert ending_kind(closing) == "livelock"
