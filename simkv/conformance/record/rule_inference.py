"""Find the rules that reproduce a recording, among releases and combinations of their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from simkv.conformance.decision_replay import Mismatch, compare, replay_decisions
from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record.recording_case import changed_settings
from simkv.core.engine_version import is_since
from simkv.schedulers.engine_registry import ENGINES
from simkv.schedulers.rule_fields import Rule, described_rules
from simkv.schedulers.sglang import versions as sglang_versions
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.versions import RELEASED as VLLM_RELEASES
from simkv.schedulers.vllm.versions import RULES, find_rules

#: vLLM's rules that recordings can show; all other rules concern start-up and defaults.
SHOWN_BY_VLLM: Mapping[str, Rule] = {
    name: rule for name, rule in described_rules(VllmRules).items() if rule.can_be_shown
}

#: vLLM's rules about features that have separate recordings; combinations of these rules are not
#: tried.
FEATURE_RULES = tuple(
    name
    for name, rule in SHOWN_BY_VLLM.items()
    if {*rule.knobs} & {"num_speculative_tokens", "num_cpu_blocks", "kv_connector"}
)

#: Rules that a recording can show, without the rules in ``FEATURE_RULES``.
OBSERVABLE_RULES: dict[str, tuple[str, ...]] = {
    "vllm": tuple(name for name in SHOWN_BY_VLLM if name not in FEATURE_RULES),
    "sglang": sglang_versions.OBSERVABLE_RULES,
}

#: The released rules, the newest first.
RELEASED_RULES: Mapping[str, Mapping[str, Any]] = {
    "vllm": {name: RULES[name] for name in VLLM_RELEASES},
    "sglang": {name: sglang_versions.RULES[name] for name in sglang_versions.RELEASES},
}

#: Maximum number of rules that may differ from the newest release.
MAX_CHANGED_RULES = 4


def can_show(version: str, rule: str) -> bool:
    """Return whether recordings of a release of vLLM can show a rule."""
    rules, described = find_rules(version), SHOWN_BY_VLLM[rule]
    if described.shown_since is not None and not is_since(version, described.shown_since):
        return False
    return (
        not any(knob in rules.fixed for knob in described.knobs)
        and all(getattr(rules, other) for other in described.needs)
        and not any(getattr(rules, other) for other in described.hidden_by)
    )


def observable_rules(trace: DecisionTrace) -> list[str]:
    """Return the rules in ``OBSERVABLE_RULES`` that a recording can show with its settings."""
    engine = trace.header["engine"]
    config = ENGINES[engine].recording.config(trace.header)
    changed = changed_settings(config).keys()
    needed = {name: rule.knobs for name, rule in SHOWN_BY_VLLM.items()} if engine == "vllm" else {}
    return [rule for rule in OBSERVABLE_RULES[engine] if {*needed.get(rule, ())} <= changed]


def find_mismatch(trace: DecisionTrace, rules: Any) -> Mismatch | None:
    """Return the first difference from a scheduler with ``rules`` (None: the variant's rules)."""
    spec = ENGINES[trace.header["engine"]]
    if rules is not None:
        spec = replace(spec, build=partial(spec.build, rules=rules))
    try:
        return compare(trace, replay_decisions(spec, trace.header, len(trace.steps)))[1]
    except Exception as error:  # incompatible rules may raise errors anywhere
        return Mismatch("?", {}, {"raised": repr(error)})


def distinct_releases(engine: str) -> dict[str, Any]:
    """Return the rules by release; of releases with equal rules, only the newest."""
    newest: dict[tuple[bool, ...], str] = {}
    seen = (*OBSERVABLE_RULES[engine], *(FEATURE_RULES if engine == "vllm" else ()))
    for name, rules in RELEASED_RULES[engine].items():
        newest.setdefault(tuple(getattr(rules, rule) for rule in seen), name)
    return {name: RELEASED_RULES[engine][name] for name in newest.values()}


def rule_combinations(engine: str, rules: Any) -> Iterator[tuple[Mapping[str, bool], Any]]:
    """Yield pairs of at most ``MAX_CHANGED_RULES`` changes and rules, the fewest changes first."""
    for count in range(1, min(len(OBSERVABLE_RULES[engine]), MAX_CHANGED_RULES) + 1):
        for names in combinations(OBSERVABLE_RULES[engine], count):
            changes = {name: not getattr(rules, name) for name in names}
            yield changes, replace(rules, **changes)
