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
    """Source of a setting without a command-line option, such as a constant or a file.

    ``note`` contains further information, such as the unit or the default.
    """

    name: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.note}" if self.note else self.name


@dataclass(frozen=True)
class Flag(KnobSource):
    """Command-line option of the engine's server for a setting.

    - ``key``: dotted path of the setting in the JSON value of the option.
    - ``unit``: unit of the option if it differs from the unit of the setting.
    - ``unreleased``: values that simkv accepts but no release of the engine has.
    """

    key: str = ""
    unit: str = ""
    unreleased: tuple[str, ...] = ()

    def to_argument(self, field: str, value: Any, *, negatable: bool) -> str:
        """Return the command-line argument that sets ``field`` to ``value``.

        ``negatable`` means that ``--no-OPTION`` turns a boolean option off. If no argument can set
        the value, the result is a description in words.
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
        if not self.key and isinstance(value, list | tuple):
            return f"{self.name} {' '.join(map(str, value))}" if value else removed
        if not self.key:
            return f"{self.name} {value}"
        if not isinstance(value, int | float | str):
            return f"{field}={json.dumps(value)} in {self.name}"
        for key in reversed(self.key.split(".")):
            value = {key: value}
        return f"{self.name} '{json.dumps(value)}'"


@dataclass(frozen=True)
class Env(KnobSource):
    """Environment variable of the engine's server that sets a field of the config."""


def sources(config: type[object]) -> dict[str, KnobSource]:
    """Return the source of each config field by field name, in field order."""
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
    """Return the command-line option of each config field that has one, by field name."""
    return {name: one.name for name, one in sources(config).items() if isinstance(one, Flag)}
