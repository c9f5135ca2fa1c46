"""Scheduling rules that differ between releases of an engine, as annotated dataclass fields.

Each field states the meaning of the rule, its place in the engine's source code, the releases in
which it applies, and the recordings that show it. simkv derives from these fields the rules of each
release, error messages, tables in the documentation, and the releases that the recorder runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from simkv.core.engine_version import is_since

Rules = TypeVar("Rules")


@dataclass(frozen=True)
class Rule:
    """A scheduling rule that applies from release ``since`` on and before release ``until``.

    - ``since``: if only ``until`` is set, the rule applies from the oldest release on. If neither
      is set, the rule applies in no release.
    - ``values``: value of the rule in each release that changes it, oldest release first. Used only
      if the rule is not a boolean.
    - ``meaning``: effect of the rule. ``otherwise``: behavior of releases without the rule.
    - ``knobs``: settings that a config must set so that recordings show the rule.
    - ``needs``: rules that must also apply so that recordings show the rule. ``hidden_by``: rules
      that hide it.
    - ``shown_since``: oldest release whose recordings show the rule; None if all recordings show
      it.
    - ``at_start``: whether the rule only affects the start-up of the engine. ``hidden``: any other
      reason why no recording shows the rule.
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
        """Releases that change the rule, each with the new value.

        The oldest release is not included.
        """
        if self.values is not None:
            return dict(list(self.values.items())[1:])
        starts = {self.since: True} if self.since else {}
        return {**starts, **({self.until: False} if self.until else {})}

    @property
    def first(self) -> Any:
        """Value of the rule in the oldest release."""
        if self.values is not None:
            return next(iter(self.values.values()))
        return self.until is not None and self.since is None

    def value_in(self, release: str) -> Any:
        """Return the value of the rule in a release."""
        value = self.first
        for start, new in self.changes.items():
            value = new if is_since(release, start) else value
        return value

    @property
    def can_be_shown(self) -> bool:
        """Whether recordings can show the rule."""
        return not (self.at_start or self.hidden)


def rule(topic: str, meaning: str, otherwise: str = "", **facts: Any) -> Any:
    """Return a dataclass field that holds a ``Rule``.

    The field's default is the value in the oldest release.
    """
    described = Rule(topic, meaning, otherwise, **facts)
    return field(default=described.first, metadata={"rule": described})


def described_rules(kind: Any) -> dict[str, Rule]:
    """Return the rules that the fields of a dataclass describe, by field name."""
    return {each.name: each.metadata["rule"] for each in fields(kind) if "rule" in each.metadata}


def rules_in(kind: type[Rules], release: str) -> Rules:
    """Return an instance of the dataclass ``kind`` with the rules of a release."""
    return kind(**{name: each.value_in(release) for name, each in described_rules(kind).items()})


def differing_rules(rules: Any, others: Any) -> list[str]:
    """Return the names of the rules whose values differ between two releases."""
    return [
        name for name in described_rules(rules) if getattr(rules, name) != getattr(others, name)
    ]


def describe_changes(rules: Any, before: Any) -> str:
    """Describe in one line the rules that a release adds, removes or changes.

    ``before`` holds the rules of the previous release.
    """
    changed = {name: getattr(rules, name) for name in differing_rules(rules, before)}
    parts = {
        "adds": [name for name, value in changed.items() if value is True],
        "removes": [name for name, value in changed.items() if value is False],
        "changes the value of": [
            name for name, value in changed.items() if not isinstance(value, bool)
        ],
    }
    return "; ".join(f"{what} {', '.join(names)}" for what, names in parts.items() if names)
