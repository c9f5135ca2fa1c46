"""Tests of the committed recordings of every engine and variant, with every kind of ending."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from simkv.conformance.decision_replay import check_trace
from simkv.conformance.decision_trace import DecisionTrace, ending_kind
from simkv.conformance.record.recording_selection import recordings_by_knob
from simkv.conformance.record.rule_inference import (
    FEATURE_RULES,
    OBSERVABLE_RULES,
    can_show,
    find_mismatch,
)
from simkv.conformance.record.sglang_cases import SHOWN_KNOBS
from simkv.core.block_pool import BlockPool
from simkv.schedulers.mistralrs.pre_bucket_scheduler import PreBucketScheduler
from simkv.schedulers.mistralrs.scheduler import BucketedScheduler, SingleLengthScheduler
from simkv.schedulers.mistralrs.scheduler_base import MistralrsScheduler
from simkv.schedulers.mistralrs.versions import RULES, VARIANTS, MistralrsRules
from simkv.schedulers.rule_fields import differing_rules
from simkv.schedulers.sglang import versions as sglang_rules
from simkv.schedulers.sglang.config import SchedulePolicy
from simkv.schedulers.vllm import versions as vllm_rules
from simkv.schedulers.vllm.release_rules import RELEASES, VllmRules
from tests.conformance.recordings import (
    FILES,
    Committed,
    all_committed,
    committed,
    of_kind,
)

RECORDINGS = all_committed()


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)
def test_simulation_reproduces_recording(recording: Committed) -> None:
    trace = recording.trace()
    result = check_trace(trace)
    assert result.difference is None
    assert result.steps == len(trace.steps)


def test_recordings_cover_every_variant_and_ending() -> None:
    closing = [(recording.engine, json.loads(recording.text.rows[-1])) for recording in RECORDINGS]
    endings = {(engine, ending_kind(line)) for engine, line in closing if line.get("truncated")}
    assert endings == {
        ("mistralrs", "panic"),
        ("mistralrs", "self-deadlock"),
        ("mistralrs", "livelock"),
        ("mistralrs", "lost"),
        ("vllm", "raised"),
        ("vllm", "stall"),
        ("sglang", "raised"),
        ("sglang", "stall"),
        ("sglang", "lost"),
        ("fastdeploy", "stall"),
        ("trtllm", "raised"),
    }
    assert {recording.release for recording in RECORDINGS} >= VARIANTS.keys()


# Mutations: if one rule of mistral.rs changes, at least one committed recording must differ.


#: How often each kind of recording (such as ``gone`` in ``gone-224``) has differed for a changed
#: rule.
SHOWED: Counter[tuple[str, str]] = Counter()


def shows(rule: str, engine: str, release: str, differs: Callable[[Committed], bool]) -> bool:
    """Whether any recording of a release differs if a rule changes.

    Recordings whose kind differed in other releases are replayed first, in order of size. This
    saves time, because most recordings do not depend on the rule, and each is replayed as a whole.
    """
    own = [recording for recording in committed(engine, release) if recording.variant == release]
    own.sort(key=lambda recording: (-SHOWED[rule, recording.kind], recording.size))
    found = next(filter(differs, own), None)
    if found:
        SHOWED[rule, found.kind] += 1
    return found is not None


def broken(variant: str) -> bool:
    return any(recording.differs() for recording in committed("mistralrs", variant))


#: No recording depends on ``mixed_decode`` of pr2034 and pr2031a; tests/schedulers tests it.
RULE_MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("bucketed", {"decode_order": "oldest first"}),
    ("merged2250", {"decode_order": "newest first"}),
    ("pr2034", {"decode_order": "newest first"}),
    ("pr2031a", {"decode_order": "oldest first"}),
    ("bucketed", {"unequal_decodes": "wait"}),
    ("bucketed", {"unequal_decodes": "run together"}),
    ("pr2031", {"unequal_decodes": "preempt"}),
    ("pr2031a", {"unequal_decodes": "wait"}),
    ("pr2034", {"unequal_decodes": "preempt"}),
    ("pr2034", {"bucket": "shortest"}),
    ("bucketed", {"bucket": "oldest"}),
    ("merged2250", {"bucket": "oldest"}),
    ("bucketed", {"mixed_prefill": True}),
    ("pr2034july", {"mixed_prefill": False}),
    ("bucketed", {"mixed_decode": "append"}),
    ("pr2034", {"evict": "one"}),
    ("bucketed", {"evict": "until it fits"}),
    ("pr2034", {"prefill_limit": False}),
    ("bucketed", {"prefill_limit": True}),
]


@pytest.mark.parametrize(
    ("variant", "change"), RULE_MUTATIONS, ids=lambda v: str(v) if isinstance(v, str) else str(*v)
)
def test_a_changed_rule_changes_decisions(
    variant: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replace(RULES[variant], **change) != RULES[variant], "the mutation changes nothing"
    monkeypatch.setitem(RULES, variant, replace(RULES[variant], **change))  # type: ignore[arg-type]
    assert broken(variant)


def test_every_rule_of_mistralrs_has_a_mutation() -> None:
    assert {field for _, change in RULE_MUTATIONS for field in change} == set(
        MistralrsRules.__dataclass_fields__
    )


#: Recordings for rules of features: of the release that changed the rule, and of the release
#: before.
AT_CHANGES = [
    (name, rule)
    for before, after in itertools.pairwise(RELEASES)
    for rule in differing_rules(vllm_rules.RULES[before], vllm_rules.RULES[after])
    if rule in FEATURE_RULES
    for name in (before, after)
    if can_show(name, rule)
]
RECORDED = [path.name.removesuffix(".jsonl.gz") for path in FILES if path.parent.name == "vllm"]


def minor_rules(release: str) -> VllmRules:
    """Return the rules of the minor release of a patch release."""
    return vllm_rules.find_rules(".".join(release.split(".")[:2]))


#: For patch releases whose rules differ from their minor release, there are recordings that depend
#: on these rules.
PATCHES = [name for name, release in RELEASES.items() if not release.stands_for_minor]
VLLM = [release for release in RECORDED if vllm_rules.RECORDED.get(release) not in PATCHES]
AT_PATCHES = [
    (release, rule)
    for release in RECORDED
    if release not in VLLM
    for rule in differing_rules(vllm_rules.find_rules(release), minor_rules(release))
]


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        (release, rule)
        for release in VLLM
        for rule in OBSERVABLE_RULES["vllm"]
        # The recordings of patch releases with this rule depend on it.
        if rule != "asserts_victims_run" and can_show(release, rule)
    ]
    + AT_CHANGES
    + AT_PATCHES,
)
def test_a_changed_rule_of_vllm_changes_decisions(
    version: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = vllm_rules.find_rules(version)
    changed = replace(rules, **{rule: not getattr(rules, rule)})
    monkeypatch.setitem(vllm_rules.RULES, vllm_rules.find_variant(version), changed)  # type: ignore[arg-type]
    assert shows(rule, "vllm", version, Committed.differs)


@pytest.mark.parametrize(
    ("version", "rule"),
    [(v, rule) for v, rules in sglang_rules.RULES_SHOWN.items() for rule in rules],
)
def test_a_changed_rule_of_sglang_changes_decisions(version: str, rule: str) -> None:
    rules = sglang_rules.RULES[version]
    changed = replace(rules, **{rule: not getattr(rules, rule)})
    assert find_mismatch(sglang_traces(version)[0], rules) is None

    def differs(recording: Committed) -> bool:
        return find_mismatch(recording.trace(), changed) is not None

    assert shows(rule, "sglang", version, differs)


def sglang_traces(version: str) -> list[DecisionTrace]:
    """Return the recordings of a release, without setups such as ``lpm``."""
    return [r.trace() for r in committed("sglang", version) if r.variant == version]


#: Policies without recordings: the default policy, and a policy that is rejected.
UNSHOWN = ("fcfs", "random")
#: Settings of SGLang that affect recordings of all releases, except the settings in ``UNSEEN``.
SHOWN = {*SHOWN_KNOBS, "prefill_decode_interval"} - {"schedule_policy", "retraction_policy"}
SHOWN |= {
    f"schedule_policy: {policy}" for policy in get_args(SchedulePolicy) if policy not in UNSHOWN
}
SHOWN |= {"retraction_policy: priority"}
#: With few rows, SGLang 0.5.15 delays prompts forever; it rejects the other settings.
UNSEEN = {
    "0.5.15": {
        "prefill_delayer_max_delay_passes",
        "prefill_decode_interval",
        "retraction_policy: priority",
    }
}


@pytest.mark.parametrize("version", sglang_rules.RELEASES)
def test_every_setting_of_sglang_changes_decisions(version: str) -> None:
    rules = sglang_rules.RULES[version]
    policies = {f"schedule_policy: {policy}" for policy in rules.policies}
    missing = {
        word
        for word in SHOWN - UNSEEN.get(version, set())
        if word in policies or not word.startswith("schedule_policy")
    }
    for trace in sglang_traces(version):
        knobs = {word.partition(":")[0] for word in missing}
        missing -= {*recordings_by_knob(rules, knobs, {trace.name: trace})}
    assert not missing


def test_every_observable_rule_of_sglang_has_a_mutation() -> None:
    # Settings without a recording: an unreleased change, settings that are rejected at start-up,
    # and a rule without effect on decisions.
    not_seen = {"lpm_aging", "lacks", "policies", "empty_opens"}
    assert {*sglang_rules.RULES_SHOWN["0.5.23"]} | not_seen == {
        *sglang_rules.SglangRules.__dataclass_fields__
    }


@pytest.mark.parametrize("version", sglang_rules.RELEASES)
def test_recordings_of_sglang_have_aborts(version: str) -> None:
    traces = sglang_traces(version)
    assert len(traces) >= 28
    assert sum("aborted" in line for trace in traces for line in trace.steps) >= 8


def test_recordings_of_vllm_have_aborts() -> None:
    releases = {vllm_rules.find_variant(release) for release in RECORDED}
    assert releases == {name for name in vllm_rules.RULES if "-" not in name}
    assert {*RECORDED} >= {*PATCHES}
    for release in VLLM:
        assert len(committed("vllm", release)) >= 25
        gone = [recording.trace() for recording in of_kind("vllm", release, "gone-")]
        assert sum("aborted" in line for trace in gone for line in trace.steps) >= 8


def test_recordings_are_small_and_few() -> None:
    assert sum(path.stat().st_size for path in FILES) <= 6_000_000
    assert len(FILES) <= 60


def _release_first_block_first(self: BlockPool, owner: int, **_: Any) -> None:
    for block in self.tables.pop(owner, ()):
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(np.array([block], dtype=np.intc))


# ruff: noqa: E501
METHOD_MUTATIONS: list[tuple[str, str, type, str, Callable[..., Any]]] = [
    ("seed needs no slot ahead", "seed", PreBucketScheduler, "_need", lambda s, q: -(-q.length // s.config.block_size)),
    ("seed takes a block for each decode", "seed", PreBucketScheduler, "_append_need", lambda s, q: 1),
    ("no lookahead in decode", "bucketed", BucketedScheduler, "_decode_tokens", lambda s, q: q.length),
    ("july looks ahead", "pr2034july", SingleLengthScheduler, "_decode_tokens", lambda s, q: q.length + 1),
    ("bounced prompts leave no phantoms", "bucketed", BucketedScheduler, "_known_tokens", lambda s, q: q.computed),
    ("july never leaves the prompt state", "pr2034july", SingleLengthScheduler, "_prompt_ran", lambda s, q: None),
    ("images do not matter to the key", "bucketed", BucketedScheduler, "_key", lambda s, q: (q.length, False)),
    ("nothing is fatal", "bucketed", MistralrsScheduler, "_fatal", lambda s, chosen, prefill: None),
    ("nothing is lost", "bucketed", MistralrsScheduler, "_lost", lambda s: []),
    ("the first block is freed first", "merged2250", BlockPool, "release", _release_first_block_first),
]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "owner", "method", "rule"),
    [case[1:] for case in METHOD_MUTATIONS],
    ids=[case[0] for case in METHOD_MUTATIONS],
)
def test_a_changed_method_changes_decisions(
    variant: str,
    owner: type,
    method: str,
    rule: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, rule)
    assert broken(variant)
