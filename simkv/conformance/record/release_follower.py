"""Determine which known rules, or combinations of them, a release uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from traceback import extract_tb
from typing import Any

from simkv.conformance.decision_replay import Mismatch
from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record.case_shrinking import shrink_case
from simkv.conformance.record.recording_case import CaseSchema, RecordingCase
from simkv.conformance.record.rule_inference import (
    distinct_releases,
    find_mismatch,
    observable_rules,
    rule_combinations,
)

#: Function that records the real scheduler's decisions in a case; the second argument is the name
#: of the recording.
RecordCase = Callable[[RecordingCase, str], DecisionTrace]

#: Maximum number of combinations of rules, in addition to the releases, that are compared with a
#: shrunk case.
COMBINATIONS_TRIED = 8


@dataclass(frozen=True)
class UnexplainedCase:
    """A shrunk case that no rules reproduce, with its first difference from ``nearest``."""

    name: str
    trace: DecisionTrace
    nearest: str
    difference: Mismatch


@dataclass(frozen=True)
class FollowResult:
    """Result of comparing a release with known rules.

    ``like`` are the releases, and ``changed`` the changes to the newest rules, that reproduce all
    decisions. ``broken`` is the error if the release cannot be recorded.
    """

    cases: int
    steps: int
    like: Sequence[str] = ()
    changed: Sequence[Mapping[str, bool]] = ()
    unexplained: UnexplainedCase | None = None
    broken: str | None = None

    @property
    def known(self) -> bool:
        """Whether an earlier release has the same rules."""
        return bool(self.like)


def follow(
    engine: str,
    form: CaseSchema,
    cases: Mapping[str, RecordingCase],
    record: RecordCase,
    time_limit: float = inf,
) -> FollowResult:
    """Find the rules that make the same decisions as an engine in ``cases``.

    After ``time_limit`` (s), no further case is recorded or shrunk.
    """
    traces: dict[str, DecisionTrace] = {}
    end = time.monotonic() + time_limit
    for name, case in cases.items():
        if traces and time.monotonic() > end:
            break
        try:
            traces[name] = record(case, name)
        except Exception as error:  # a new release may have changed in any way
            return _result(traces, broken=describe_crash(name, error))
    known = distinct_releases(engine)
    like, last = _all_through(traces, known)
    if like:
        return _result(traces, like=list(like))
    combinations = list(rule_combinations(engine, next(iter(known.values()))))
    mixed = {str(i): rules for i, (_, rules) in enumerate(combinations)}
    fitting, missed = _all_through({last: traces[last], **traces}, mixed, mixed=True)
    if fitting:
        changes = [combinations[int(key)][0] for key in fitting]
        fewest = min(map(len, changes))
        return _result(traces, changed=[changed for changed in changes if len(changed) == fewest])
    asked = known
    rivals = known | {key: mixed[key] for key in _lasting(missed, traces, mixed, mixed=True)}
    names = (name for name in (missed, *traces) if _unmade(traces[name], rivals))
    # each case agrees with some release, but no release agrees with all cases
    if (missed := next(names, "")) == "":
        missed = last
        asked = rivals = {key: known[key] for key in _lasting(last, traces, known)}

    def unlike_all(case: RecordingCase) -> bool:
        if time.monotonic() > end:
            return False
        try:
            trace = record(case, missed)
        except Exception:
            return False
        return _unmade(trace, rivals)

    small = record(shrink_case(cases[missed], form, unlike_all), missed)
    return _result(traces, unexplained=_nearest(missed, small, asked))


def describe_crash(name: str, error: Exception) -> str:
    """Describe an exception of the real scheduler in a case, with the place where it was raised."""
    at = extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{name}: {said} ({Path(at.filename).name}:{at.lineno})"


def _unmade(trace: DecisionTrace, rules: Mapping[str, Any]) -> bool:
    """Return whether no entry of ``rules`` reproduces a trace."""
    return all(find_mismatch(trace, each) for each in rules.values())


def _all_through(
    traces: Mapping[str, DecisionTrace], rules: Mapping[str, Any], *, mixed: bool = False
) -> tuple[dict[str, Any], str]:
    """Return the ``rules`` that reproduce all ``traces``, and the first trace that none reproduces.

    With ``mixed``, rules that are equal in all rules that a trace can show are compared once.
    """
    left = dict(rules)
    for name, trace in traces.items():
        shown, made = observable_rules(trace), dict[Hashable, bool]()
        for key, known in list(left.items()):
            alike = tuple(getattr(known, rule) for rule in shown) if mixed else key
            if alike not in made:
                made[alike] = not find_mismatch(trace, known)
            if not made[alike]:
                del left[key]
        if not left:
            return {}, name
    return left, ""


def _lasting(
    missed: str,
    traces: Mapping[str, DecisionTrace],
    rules: Mapping[str, Any],
    *,
    mixed: bool = False,
) -> list[str]:
    """Return at most ``COMBINATIONS_TRIED`` rules that reproduce all traces before ``missed``."""
    before = list(traces)[: list(traces).index(missed)]
    left, _ = _all_through({name: traces[name] for name in before}, rules, mixed=mixed)
    return list(left)[:COMBINATIONS_TRIED]


def _nearest(name: str, trace: DecisionTrace, known: Mapping[str, Any]) -> UnexplainedCase:
    """Return a recording as an unexplained case, with the release that reproduces most steps."""
    found = {
        key: mismatch for key, each in known.items() if (mismatch := find_mismatch(trace, each))
    }
    steps = [*(str(line["step"]) for line in trace.steps), "end"]

    def how_far(key: str) -> int:
        at = found[key].step
        return steps.index(at) if at in steps else 0

    best = max(found, key=how_far)
    return UnexplainedCase(name, trace, best, found[best])


def _result(traces: Mapping[str, DecisionTrace], **found: Any) -> FollowResult:
    return FollowResult(len(traces), sum(len(trace.steps) for trace in traces.values()), **found)
