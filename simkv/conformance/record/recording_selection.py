"""Select the recordings of a release that are kept as test data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from simkv.conformance.decision_trace import DecisionTrace, pack_traces
from simkv.conformance.record.recording_case import changed_settings, default_settings
from simkv.conformance.record.rule_inference import find_mismatch
from simkv.core.errors import InputError
from simkv.schedulers.engine_registry import ENGINES

#: Number of random cases to keep, and number of the smallest recordings that are searched for one
#: that shows a rule or depends on a setting.
RANDOM_CASES_KEPT = 28
RECORDINGS_SEARCHED = 300


def recordings_by_rule(
    rules: Any, seen: Collection[str], traces: Mapping[str, DecisionTrace]
) -> dict[str, list[str]]:
    """Return, for each rule in ``seen``, the recordings that differ if the rule is inverted."""
    return {
        rule: [
            name
            for name, trace in traces.items()
            if find_mismatch(trace, replace(rules, **{rule: not getattr(rules, rule)}))
        ]
        for rule in seen
    }


def recordings_by_knob(
    rules: Any, knobs: Collection[str], traces: Mapping[str, DecisionTrace]
) -> dict[str, list[str]]:
    """Return, for each setting, the recordings that differ with the default of the setting."""
    shown: dict[str, list[str]] = {}
    for name, trace in traces.items():
        recording = ENGINES[trace.header["engine"]].recording
        config = recording.config(trace.header)
        plain = default_settings(config)
        for knob, value in changed_settings(config).items():
            if knob not in knobs:
                continue
            try:
                without = recording.knobs(replace(config, **{knob: plain[knob]}))
            except ValueError:  # another setting requires this setting
                continue
            header = {**trace.header, "config": without}
            if find_mismatch(replace(trace, header=header), rules):
                word = f"{knob}: {value}" if isinstance(value, str) else knob
                shown.setdefault(word, []).append(name)
    return shown


def choose(
    rules: Any,
    seen: Collection[str],
    traces: Mapping[str, DecisionTrace],
    knobs: Collection[str] = (),
) -> list[str]:
    """Return the recordings to store: two per rule and setting, and small random ones.

    Raises InputError if no recording shows a rule.
    """
    traces = dict(sorted(traces.items(), key=lambda item: len(pack_traces([item[1]]))))
    apart = recordings_by_rule(rules, seen, dict(list(traces.items())[:RECORDINGS_SEARCHED]))
    if unseen := [rule for rule, names in apart.items() if not names]:
        raise InputError(
            f"no recorded case covers {', '.join(unseen)}; record more cases (--cases)"
        )
    kept = dict.fromkeys(name for names in apart.values() for name in names[:2])
    for told, most in (
        (("preempted", "aborted"), RANDOM_CASES_KEPT // 3),
        (("preempted",), RANDOM_CASES_KEPT),
        ((), RANDOM_CASES_KEPT),
    ):
        for name, trace in traces.items():
            if _has(trace, *told) and sum(_has(traces[other], *told) for other in kept) < most:
                kept[name] = None
    for names in recordings_by_knob(
        rules, knobs, dict(list(traces.items())[:RECORDINGS_SEARCHED])
    ).values():
        kept |= dict.fromkeys(names[:2])
    return list(kept)


def _has(trace: DecisionTrace, *fields: str) -> bool:
    """Return whether each of ``fields`` is not empty in some step of a recording."""
    return all(any(line.get(field) for line in trace.steps) for field in fields)
