"""Rules that differ between the releases of an engine, as annotated fields of a dataclass.

A rule states once what it means, where the engine's source has it, in which releases it holds and
which recordings show it. Releases, messages, tables of the documentation and the recorder's
selection follow from these fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from simkv.core.engine_version import is_since

Rules = TypeVar("Rules")


@dataclass(frozen=True)
class Rule:
    """A rule of an engine; it holds from release ``since`` on and before release ``until``.

    Without ``since`` it holds from the oldest release on if ``until`` is given, else in no release.
    ``values`` replaces both for rules with values: the value from each release on, oldest first.

    ``otherwise`` is the behavior of releases without the rule. A recording shows the rule if its
    config sets all ``knobs``. In addition the release must have the rules in ``needs`` and none in
    ``hidden_by``. ``shown_since`` is the oldest release whose committed recordings show the rule;
    without it, those of all releases do.

    ``at_start``: the rule decides at start-up or sets a default, which no recording shows.
    ``hidden``: the reason why no recording shows it, if it is another one.
    """

    topic: str
    meaning: str
    otherwise: str = ""
    source: str = ""
    since: str | None = None
    until: str | None = None
    values: Mapping[str, Any] | None = None
    knobs: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    hidden_by: tuple[str, ...] = ()
    shown_since: str | None = None
    at_start: bool = False
    hidden: str = ""

    @property
    def changes(self) -> dict[str, Any]:
        """Values of the rule by the release from which on they apply, without the oldest."""
        if self.values is not None:
            return dict(list(self.values.items())[1:])
        starts = {self.since: True} if self.since else {}
        return {**starts, **({self.until: False} if self.until else {})}

    @property
    def first(self) -> Any:
        """Value in the oldest release."""
        if self.values is not None:
            return next(iter(self.values.values()))
        return self.until is not None and self.since is None

    def value_in(self, release: str) -> Any:
        """Return the value in a release."""
        value = self.first
        for start, new in self.changes.items():
            value = new if is_since(release, start) else value
        return value

    @property
    def can_be_shown(self) -> bool:
        """Whether recordings can show the rule."""
        return not (self.at_start or self.hidden)


def rule(topic: str, meaning: str, otherwise: str = "", **facts: Any) -> Any:
    """Return a dataclass field for a ``Rule``; its default is the value in the oldest release."""
    described = Rule(topic, meaning, otherwise, **facts)
    return field(default=described.first, metadata={"rule": described})


def described_rules(kind: Any) -> dict[str, Rule]:
    """Return the rules of a dataclass by the names of their fields."""
    return {each.name: each.metadata["rule"] for each in fields(kind) if "rule" in each.metadata}


def rules_in(kind: type[Rules], release: str) -> Rules:
    """Return the rules of a release."""
    return kind(**{name: each.value_in(release) for name, each in described_rules(kind).items()})


def differing_rules(rules: Any, others: Any) -> list[str]:
    """Return the names of the rules in which two releases differ."""
    return [
        name for name in described_rules(rules) if getattr(rules, name) != getattr(others, name)
    ]


def describe_changes(rules: Any, before: Any) -> str:
    """Return the rules that a release adds, ends or changes, compared with the release before."""
    changed = {name: getattr(rules, name) for name in differing_rules(rules, before)}
    parts = {
        "adds": [name for name, value in changed.items() if value is True],
        "ends": [name for name, value in changed.items() if value is False],
        "changes": [name for name, value in changed.items() if not isinstance(value, bool)],
    }
    return "; ".join(f"{what} {', '.join(names)}" for what, names in parts.items() if names)
