"""Annotations that name the source of an engine setting, such as a flag or environment variable.

class VllmConfig:
   block_size: Annotated[int, Gt(0), Flag("--block-size")] = 16

flags(VllmConfig)["block_size"]  # "--block-size"

Suggested fixes, version checks and log readers depend on these annotations. The text under a field
is documentation only.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast, get_type_hints


@dataclass(frozen=True)
class KnobSource:
    """Source of a setting that has no command-line option: a constant, a file or a pull request.

    ``note`` contains further information for readers, such as the unit or the default.
    """

    name: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.note}" if self.note else self.name


@dataclass(frozen=True)
class Flag(KnobSource):
    """The command-line option of the engine's server for a setting, with its dashes.

    ``key`` is the dotted path of the setting in the value of an option that takes JSON. ``unit`` is
    the unit of the option's value if it differs from the unit of the setting. ``unreleased`` are
    values that simkv accepts but no release of the engine has.
    """

    key: str = ""
    unit: str = ""
    unreleased: tuple[str, ...] = ()

    def to_argument(self, field: str, value: Any, *, negatable: bool) -> str:
        """Return the command-line argument that sets ``field`` to ``value``.

        With ``negatable``, the server disables a boolean option with ``--no-OPTION``. If no
        argument can express the value, the result is a description in words.
        """
        removed = f"without {self.name}"
        if value in self.unreleased:
            return f"{field}={value} (in no release)"
        if value is True:
            return self.name
        if value is False:
            return f"--no-{self.name.removeprefix('--')}" if negatable else removed
        if value is None or (value == 0 and (self.key or self.unit)):
            return removed
        if self.unit:
            return f"{field}={value} ({self.name} in {self.unit})"
        if not self.key:
            return f"{self.name} {value}"
        if not isinstance(value, int | float | str):
            return f"{field}={json.dumps(value)} in {self.name}"
        for key in reversed(self.key.split(".")):
            value = {key: value}
        return f"{self.name} '{json.dumps(value)}'"


@dataclass(frozen=True)
class Env(KnobSource):
    """The environment variable of the engine's server that sets a field."""


def sources(config: type[object]) -> dict[str, KnobSource]:
    """Return a mapping from field name to the declared source, in field order."""
    return _sources(cast(Hashable, config))


@cache
def _sources(config: Any) -> dict[str, KnobSource]:
    hints = get_type_hints(config, include_extras=True)
    return {
        name: mark
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, KnobSource)
    }


def flags(config: type[object]) -> dict[str, str]:
    """Return a mapping from field name to command-line option, for the fields that have one."""
    return {name: one.name for name, one in sources(config).items() if isinstance(one, Flag)}
