"""Which of the known rules a release goes by, from what its scheduler decides.

All releases that are known are asked first, then combinations of their rules. If none makes the
decisions of the release, the first case that none makes is shrunk and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any

from simkv.proof.conform.conform import Mismatch
from simkv.proof.conform.trace import DecisionTrace
from simkv.proof.record.case import CaseForm, DrawnCase
from simkv.proof.record.rules import combined, difference, releases, showable
from simkv.proof.record.shrink import shrunk

#: What a case makes the real scheduler decide; the second argument names the recording.
Recorded = Callable[[DrawnCase, str], DecisionTrace]

#: A case that is shrunk is asked of so many combinations, besides the releases.
ASKED = 8


@dataclass(frozen=True)
class Unlike:
    """A case that no known rules make, as small as it was found, and where ``nearest`` parts."""

    name: str
    trace: DecisionTrace
    nearest: str
    difference: Mismatch


@dataclass(frozen=True)
class Followed:
    """What became of following a release through ``cases`` cases of ``steps`` steps in all.

    ``like`` are the releases whose rules make all its decisions. If none does, ``changed`` are
    combinations that do, each as what it changes in the newest release; if none of those does
    either, ``unlike`` shows it. ``broken`` says what went wrong if the release cannot be driven.
    """

    cases: int
    steps: int
    like: Sequence[str] = ()
    changed: Sequence[Mapping[str, bool]] = ()
    unlike: Unlike | None = None
    broken: str | None = None

    @property
    def known(self) -> bool:
        """Whether the release goes by the rules of one before it."""
        return bool(self.like)


def follow(
    engine: str, form: CaseForm, cases: Mapping[str, DrawnCase], record: Recorded
) -> Followed:
    """Record all ``cases`` of an engine and find the rules that decide in the same way."""
    traces: dict[str, DecisionTrace] = {}
    for name, case in cases.items():
        try:
            traces[name] = record(case, name)
        except Exception as error:  # a release may have changed in any way
            return Followed(len(traces), _steps(traces), broken=died(name, error))
    done = len(traces), _steps(traces)
    known = releases(engine)
    like, last = _all_through(traces, known)
    if like:
        return Followed(*done, like=list(like))
    base = next(iter(known.values()))
    mixed = {str(i): rules for i, (_, rules) in enumerate(combined(engine, base))}
    changes = {str(i): changed for i, (changed, _) in enumerate(combined(engine, base))}
    fitting, missed = _all_through({last: traces[last], **traces}, mixed, mixed=True)
    if fitting:
        fewest = min(len(changes[key]) for key in fitting)
        found = [changes[key] for key in fitting if len(changes[key]) == fewest]
        return Followed(*done, changed=found)
    asked = known
    rivals = known | {key: mixed[key] for key in _lasting(missed, traces, mixed, mixed=True)}
    names = (name for name in (missed, *traces) if _unmade(traces[name], rivals))
    if (missed := next(names, "")) == "":  # some release makes each case, but none makes all
        missed = last
        asked = rivals = {key: known[key] for key in _lasting(last, traces, known)}

    def unlike_all(case: DrawnCase) -> bool:
        try:
            trace = record(case, missed)
        except Exception:
            return False
        return _unmade(trace, rivals)

    small = record(shrunk(cases[missed], form, unlike_all), missed)
    return Followed(*done, unlike=_nearest(missed, small, asked))


def died(name: str, error: Exception) -> str:
    """Of what the real scheduler died in a case, and where: some assertions have no words."""
    at = extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{name}: {said} ({Path(at.filename).name}:{at.lineno})"


def _unmade(trace: DecisionTrace, rules: Mapping[str, Any]) -> bool:
    """Whether none of ``rules`` makes a trace."""
    return all(difference(trace, each) for each in rules.values())


def _all_through(
    traces: Mapping[str, DecisionTrace], rules: Mapping[str, Any], *, mixed: bool = False
) -> tuple[dict[str, Any], str]:
    """Those of ``rules`` that make all ``traces``; the name of the one that left nobody.

    ``mixed``: they are combinations over one release, so those that are alike in what a trace can
    show are asked once.
    """
    left = dict(rules)
    for name, trace in traces.items():
        shown, made = showable(trace), dict[Hashable, bool]()
        for key, known in list(left.items()):
            alike = tuple(getattr(known, rule) for rule in shown) if mixed else key
            if alike not in made:
                made[alike] = not difference(trace, known)
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
    """Those of ``rules`` that made the cases before the ``missed`` one, at most ``ASKED``."""
    before = list(traces)[: list(traces).index(missed)]
    left, _ = _all_through({name: traces[name] for name in before}, rules, mixed=mixed)
    return list(left)[:ASKED]


def _nearest(name: str, trace: DecisionTrace, known: Mapping[str, Any]) -> Unlike:
    """The release that gets farthest in a recording that none makes."""
    found = {key: difference(trace, rules) for key, rules in known.items()}
    steps = [str(line["step"]) for line in trace.steps]

    def how_far(key: str) -> int:
        mismatch = found[key]
        at = mismatch.step if mismatch else "end"
        return steps.index(at) if at in steps else len(steps) * (at == "end")

    best = max(found, key=how_far)
    mismatch = found[best]
    assert mismatch is not None
    return Unlike(name, trace, best, mismatch)


def _steps(traces: Mapping[str, DecisionTrace]) -> int:
    return sum(len(trace.steps) for trace in traces.values())
