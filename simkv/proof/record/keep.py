"""Which recordings of a release are worth keeping, and how they are written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping

from simkv.core.errors import InputError
from simkv.proof.conform.trace import DecisionTrace
from simkv.proof.record.rules import SEEN, can_show, difference, with_changes
from simkv.schedulers.vllm.versions import rules_of

#: So many of the random cases are kept; so many of the smallest are asked which rules they show.
KEPT = 28
SEARCHED = 300


def packed(trace: DecisionTrace) -> bytes:
    """A recording as the file that ``simkv conform`` reads."""
    lines = [trace.header, *trace.steps, *([trace.truncated] if trace.truncated else [])]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return gzip.compress(text.encode(), mtime=0)


def told_apart(version: str, traces: Mapping[str, DecisionTrace]) -> dict[str, list[str]]:
    """By rule the recordings that differ if it is flipped, in the order of ``traces``."""
    rules = rules_of(version)
    return {
        rule: [
            name
            for name, trace in traces.items()
            if difference(trace, with_changes(rules, {rule: not getattr(rules, rule)}))
        ]
        for rule in SEEN
    }


def choose(version: str, traces: Mapping[str, DecisionTrace]) -> list[str]:
    """``KEPT`` recordings: two for every rule that can be seen, then the smallest that preempt.

    A third has clients that really leave, as far as rules do not ask for more. Raises InputError
    if a rule shows in none of them: more cases are to be tried then.
    """
    traces = dict(sorted(traces.items(), key=lambda item: len(packed(item[1]))))
    apart = told_apart(version, dict(list(traces.items())[:SEARCHED]))
    if unseen := [rule for rule, names in apart.items() if not names and can_show(version, rule)]:
        raise InputError(f"{version}: no case shows {', '.join(unseen)}; record more with --cases")
    kept = dict.fromkeys(name for names in apart.values() for name in names[:2])
    for field, most in (("aborted", KEPT // 3), ("preempted", KEPT)):
        for name, trace in traces.items():
            if _has(trace, "preempted") and _has(trace, field):
                have = sum(_has(traces[other], field) for other in kept)
                kept |= {name: None} if have < most else {}
    return list(kept)


def _has(trace: DecisionTrace, field: str) -> bool:
    """Whether ``field`` ever says something."""
    return any(line.get(field) for line in trace.steps)
