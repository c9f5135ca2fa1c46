"""Command-line options of an engine's server, as data for the parser of launch commands.

A JSON file lists the options of all releases by kind: ``switches`` take no value, ``lists`` take
one or more values, and ``values`` take one value. ``aliases`` maps other spellings to the names in
these lists. ``spans`` maps an option that some of the ``releases`` do not have to the first and the
last release that has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from simkv.core.engine_version import is_since
from simkv.core.errors import InputError, spelling_hint

#: Suffixes of numbers that engines accept, with their factors: decimal (1k = 1000) or binary (1K =
#: 1024).
_UNITS = {letter: 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {letter: 1024**power for power, letter in enumerate("KMGT", start=1)}
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


class NotModelled(ValueError):
    """Raised for an option that simkv does not simulate. The message is the reason."""


#: Values of scenario fields by dotted path, such as ``hardware.tp``.
FieldValues = Mapping[str, Any]
#: Function that converts the value of an option to scenario fields. Raises NotModelled.
Conversion = Callable[[Any], FieldValues]


@dataclass(frozen=True)
class RankOptions:
    """Parallelism of a server.

    - ``tp``: GPUs per rank. ``dp``: number of ranks.
    - ``experts``: whether the model is a mixture of experts.
    - ``options``: all options by name.
    """

    tp: int
    dp: int
    experts: bool
    options: Mapping[str, Any]


def _no_ranks(ranks: RankOptions) -> FieldValues:
    return {"hardware.tp": ranks.tp}


#: Function that returns the fields that a release ignores, with the reason. Its arguments are the
#: values of the options by name, and the release.
IgnoredFields = Callable[[Mapping[str, Any], str], Mapping[str, str]]


@dataclass(frozen=True)
class LaunchOptions:
    """Options of an engine's server, and the commands that start it.

    - ``module``: path of the module that defines the options.
    - ``programs``: commands that start the server. ``modules``: modules for ``python -m``.
    - ``images``: container images. ``serving_images``: images that start the server.
    - ``model``: options that name the model. ``model_argument``: whether the first positional
      argument can name the model.
    - ``tp``, ``dp``: options for tensor and data parallelism. ``ranks``: function that converts
      them to scenario fields.
    - ``converted``: functions that convert options. ``variables``: functions that convert
      environment variables.
    - ``not_modelled``: patterns of options that simkv does not simulate, each with the reason.
    - ``ignored``: function that returns the fields of options that a release ignores.
    """

    # ``server_options.json`` is in the directory of ``module``. Options that the engine's config
    # declares are converted too. All other options have no effect on scheduling.

    module: str
    programs: tuple[tuple[str, ...], ...]
    modules: tuple[str, ...]
    images: tuple[str, ...]
    model: tuple[str, ...]
    tp: str
    dp: str
    serving_images: tuple[str, ...] = ()
    model_argument: bool = False
    start: str = ""
    """Command that starts the server; it contains ``{model}`` in place of the model's name."""
    transfer: str = ""
    """Arguments of a server that only prefills or only decodes; empty if the server does not
    support this.
    """
    ranks: Callable[[RankOptions], FieldValues] = _no_ranks
    converted: Mapping[str, Conversion] = field(default_factory=dict)
    variables: Mapping[str, Conversion] = field(default_factory=dict)
    not_modelled: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Options that set a key of a JSON option, with the option and the key."""
    ignored: IgnoredFields = lambda _, __: {}
    inverse_since: str | None = None
    """First release with an option ``--disable-X`` for each switch ``--enable-X``."""
    neutral: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of options in ``not_modelled`` that are accepted because they have no effect, such as
    a default.
    """

    @cached_property
    def _data(self) -> dict[str, Any]:
        file = Path(self.module).with_name("server_options.json")
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return data

    @cached_property
    def _known(self) -> dict[str, str]:
        """Kind of each option: ``switch``, ``value`` or ``list``."""
        data = self._data
        kinds = {"switches": "switch", "values": "value", "lists": "list"}
        return {name: kind for key, kind in kinds.items() for name in data[key]}

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return dict(self._data["aliases"])

    def find(self, word: str, *, negatable: bool) -> tuple[str, str, bool] | None:
        """Return the name and the kind of an option, and whether ``word`` turns the option off.

        Returns None for an unknown option. A name can be abbreviated to a unique prefix. With
        ``negatable``, ``--no-X`` turns off the switch ``--X``, and ``--disable-X`` the switch
        ``--enable-X``. Raises InputError for an ambiguous prefix.
        """
        # As in argparse, underscores count as dashes.
        name = "--" + word[2:].replace("_", "-") if word.startswith("--") else word
        name = self._aliases.get(name, name)
        if name in self._known:
            return name, self._known[name], False
        if not name.startswith("--"):
            return None
        if negatable and name.startswith("--no-"):
            positive = self.find("--" + name[5:], negatable=False)
            if positive and positive[1] == "switch":
                return positive[0], "switch", True
        enabled = name.replace("--disable-", "--enable-", 1)
        if negatable and enabled != name and self._known.get(enabled) == "switch":
            return enabled, "switch", True
        longer = [one for one in (*self._known, *self._aliases) if one.startswith(name)]
        found = {self._aliases.get(one, one) for one in longer}
        if len(found) > 1:
            raise InputError(f"{word}: ambiguous option; could be {', '.join(sorted(found))}")
        return (one := found.pop(), self._known[one], False) if found else None

    def is_absent(self, text: str, name: str, release: str) -> bool:
        """Return whether a release is known not to have an option.

        ``text`` is the option as written, and ``name`` is its name.
        """
        flag = re.split("[ =.]", text)[0].replace("_", "-")
        name = flag if flag in self._known else name
        has_inverses = self.inverse_since is not None and is_since(release, self.inverse_since)
        if flag.startswith("--disable-") and name.startswith("--enable-"):
            return not has_inverses
        twin = name.replace("--disable-", "--enable-", 1)
        if twin != name and twin in self._known and has_inverses:
            return self.is_absent(twin, twin, release)
        span = self._data.get("spans", {}).get(name)
        if span is None:
            return False
        releases = self._data["releases"]
        first, last = (releases.index(one) for one in span.split())
        too_old = first > 0 and is_since(releases[first - 1], release)
        too_new = last + 1 < len(releases) and is_since(release, releases[last + 1])
        return too_old or too_new

    def hint(self, word: str) -> str:
        """Return a spelling suggestion: the option that is most similar to ``word``."""
        return spelling_hint(word.replace("_", "-"), list(self._known))

    def reason(self, name: str) -> str | None:
        """Return why an option is not modelled, or None."""
        for pattern, reason in self.not_modelled.items():
            if re.fullmatch(pattern, name):
                return reason
        return None


def parse_option_value(text: str) -> Any:
    """Parse the value of an option.

    The value is JSON, a number with a unit (such as 8k) or text.
    """
    if match := _WITH_UNIT.fullmatch(text):
        return int(float(match[1]) * _UNITS[match[2]])
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value
