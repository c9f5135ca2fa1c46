"""The source of each engine setting: a flag, an environment variable or other, as an annotation.

class VllmConfig:
   block_size: Annotated[int, Gt(0), Flag("--block-size")] = 16

flags(VllmConfig)["block_size"]  # "--block-size"

Suggested fixes, versions and log readers depend on these; the text under a field is documentation
only.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast, get_type_hints


@dataclass(frozen=True)
class KnobSource:
    """The source of a setting that no option sets: a constant, a file or a pull request.

    ``note`` is for the reader, such as the option's unit or its default.
    """

    name: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.note}" if self.note else self.name


@dataclass(frozen=True)
class Flag(KnobSource):
    """The command-line option of the engine's server for a setting, with its dashes.

    ``key`` is the dotted path of the setting in the value of an option that takes JSON. ``unit`` is
    the unit of the option's value where it differs from the unit of the setting.
    """

    key: str = ""
    unit: str = ""

    def to_argument(self, field: str, value: Any, *, negatable: bool) -> str:
        """Return the command-line argument that sets ``field`` to ``value``.

        ``negatable``: the server turns a switch off with ``--no-SWITCH``. A setting without such an
        argument is named in words.
        """
        removed = f"without {self.name}"
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
    """The environment variable of the engine's server for a setting."""


def sources(config: type[object]) -> dict[str, KnobSource]:
    """Return the declared source of each setting of a config class, by field, in order."""
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
    """Return the command-line option of each setting that has one, by field."""
    return {name: one.name for name, one in sources(config).items() if isinstance(one, Flag)}
