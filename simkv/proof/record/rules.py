"""Which rules of vLLM a recording goes by: those of releases, and their combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, TypeVar, cast

from simkv.proof.conform.conform import Mismatch, compare, replay
from simkv.proof.conform.trace import DecisionTrace
from simkv.schedulers.registry import ENGINES
from simkv.schedulers.vllm.versions import MINORS, RULES, VllmRules, rules_of

#: Rules that a recording can show; the others are about start-up and defaults, which it states.
SEEN = (
    "keyless_first",
    "threshold_spares_lone",
    "two_budgets",
    "goes_on",
    "finds_next",
    "drops_victims",
    "breaks_ties",
    "sees_the_end",
    "skip_blocked",
    "counts_all_loras",
    "turns_skipped",
    "skipped_apart",
)

#: The knob without which a release cannot show a rule.
SHOWN_BY = {
    "two_budgets": "max_num_scheduled_tokens",
    "sees_the_end": "async_scheduling",
    "counts_all_loras": "async_scheduling",
    **dict.fromkeys(("goes_on", "finds_next", "drops_victims", "breaks_ties"), "policy"),
}


Rules = TypeVar("Rules")


def can_show(version: str, rule: str) -> bool:
    """Whether a release can show a rule at all: some need a knob that it does not have."""
    return SHOWN_BY.get(rule) not in rules_of(version).fixed


def difference(trace: DecisionTrace, rules: Any) -> Mismatch | None:
    """Where its engine's scheduler with these rules parts from a recording, if it does."""
    spec = ENGINES[trace.header["engine"]]
    spec = replace(spec, build=partial(spec.build, rules=rules))
    try:
        return compare(trace, replay(spec, trace.header, len(trace.steps)))[1]
    except Exception as error:  # rules that do not go together may end anywhere
        return Mismatch("?", {}, {"raised": repr(error)})


def releases() -> dict[str, VllmRules]:
    """The rules of releases that decide differently, each by its newest release."""
    newest: dict[tuple[bool, ...], str] = {}
    for name in MINORS.values():
        newest.setdefault(_seen(RULES[name]), name)
    return {name: RULES[name] for name in newest.values()}


#: So many rules may differ at once from those of the newest release.
MOST_CHANGED = 4


def combined(rules: VllmRules) -> Iterator[tuple[Mapping[str, bool], VllmRules]]:
    """The combinations of the rules that can be seen, by what they change in ``rules``."""
    for count in range(1, MOST_CHANGED + 1):
        for names in combinations(SEEN, count):
            changes = {name: not getattr(rules, name) for name in names}
            yield changes, with_changes(rules, changes)


def with_changes(rules: Rules, changes: Mapping[str, Any]) -> Rules:
    """Other rules, in which ``changes`` are made."""
    changed: Rules = replace(cast(Any, rules), **changes)
    return changed


def _seen(rules: VllmRules) -> tuple[bool, ...]:
    return tuple(getattr(rules, rule) for rule in SEEN)
