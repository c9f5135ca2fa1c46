"""Read a server's launch line: the scenario fields that it sets, and the use of each option.

line = read_launch_line("vllm serve Qwen/Qwen3-32B -tp 2 --max-num-seqs 512 --port 8001")
line.fields   # {"engine.max_num_seqs": 512, "hardware.model": ..., "hardware.tp": 2}
line.options  # one entry per option: used, ignored, not modelled or unknown

Each option sets a field, has no effect on scheduling (``ignored``), or is ``not modelled`` with a
reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from simkv.core.engine_flags import Flag, sources
from simkv.core.engine_spec import EngineSpec
from simkv.core.errors import InputError
from simkv.core.server_options import (
    LaunchOptions,
    NotModelled,
    RankOptions,
    parse_option_value,
)
from simkv.costs.hardware.model_gpu_catalog import find_architecture
from simkv.scenario.launch_words import (
    LaunchWords,
    find_launch_words,
    join_words,
    unset_variable,
    without_value,
)
from simkv.scenario.yaml_document import read_document
from simkv.schedulers.engine_registry import ENGINES

#: Options with a secret value, which is not printed, and the variable that replaces it.
SECRETS = {
    "api-key": "API_KEY",
    "admin-api-key": "ADMIN_API_KEY",
    "hf-token": "HF_TOKEN",
    "ssl-keyfile-password": "SSL_KEYFILE_PASSWORD",
}
#: Last words of the names of environment variables with a secret value.
_SECRET_WORDS = ("KEY", "TOKEN", "PASSWORD", "SECRET")

Effect = Literal["used", "ignored", "not modelled", "unknown"]


@dataclass(frozen=True)
class OptionUse:
    """An option of a launch line.

    ``text`` is the option as written, and ``name`` is the engine's name of the option, or "" for an
    unknown option. ``effect`` is the use of the option by simkv. ``reason`` says why the option is
    not modelled. ``fields`` are the scenario fields that the option sets.
    """

    text: str
    effect: Effect
    reason: str = ""
    fields: tuple[str, ...] = ()
    name: str = ""


def _without_secret(text: str) -> str:
    """Return the option with a variable in place of its value if the value is a secret."""
    flag, between, value = text.partition("=" if "=" in text else " ")
    variable = SECRETS.get(flag.lstrip("-").replace("_", "-"))
    return f"{flag}{between}${variable}" if variable and value else text


@dataclass(frozen=True)
class LaunchLine:
    """Scenario fields that a launch line sets, by dotted path, and the use of each option.

    ``model`` is the name in the line. ``version`` is the engine's release, or None if not given.
    ``values`` are the values of the options, by name.
    """

    engine: str
    model: str | None
    version: str | None
    fields: Mapping[str, Any]
    options: tuple[OptionUse, ...]
    values: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> list[str]:
        """Return lines of text about the options that have no effect in the simulation."""
        ignored = [one.text for one in self.options if one.effect == "ignored"]
        lines = [f"ignored (no effect on scheduling): {', '.join(ignored)}"] if ignored else []
        lines += [
            f"{one.effect}: {one.text}: {one.reason}"
            for one in self.options
            if one.effect in ("not modelled", "unknown")
        ]
        return lines

    def given_by(self, path: str) -> str | None:
        """Return the option of the launch line that set a field, or None."""
        return next((one.text for one in self.options if path in one.fields), None)


def read_launch_line(text: str, option: str = "--from-command") -> LaunchLine:
    """Read a launch line, or the script or compose file that ``text`` names.

    Raises InputError if the text contains no launch line, or if an option has no value.
    """
    return _Reader(find_launch_words(text, option), option).read()


@dataclass
class _Given:
    """An option of a launch line: its text, name, value, and the key within a JSON value."""

    text: str
    name: str
    value: Any
    key: str = ""


@dataclass
class _Reader:
    """Reader of the words of one launch line."""

    launch: LaunchWords
    option: str
    uses: list[OptionUse] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def read(self) -> LaunchLine:
        """Read all words."""
        given, model = self._split(list(self.launch.words))
        given = self._merged(given)
        own = [one.value for one in given if one.name in self.server.model]
        model = str(own[-1]) if own else model
        values = {one.name: one.value for one in given if not one.key}
        for one in given:
            self._take(one)
        self._place_ranks(values, model)
        for name, value in self.launch.variables.items():
            self._variable(name, value)
        return LaunchLine(
            self.launch.engine, model, self.launch.version, self.fields, tuple(self.uses), values
        )

    @property
    def spec(self) -> EngineSpec:
        return ENGINES[self.launch.engine]

    @property
    def server(self) -> LaunchOptions:
        assert self.spec.server_options is not None
        return self.spec.server_options

    def _split(self, words: list[str]) -> tuple[list[_Given], str | None]:
        """Return the options and the model argument; options of a ``--config`` file come first."""
        given: list[_Given] = []
        model = None
        while words:
            word = words.pop(0)
            if not word.startswith("-") or word == "-":
                self._require_value(word)
                if self.server.model_argument and model is None:
                    model = word
                elif "$" in word and word not in ("$@", "$*"):
                    shown = "$(...)" if word == "$" else word
                    raise InputError(
                        f"--from-command: {shown}: this may contain options, but its value is "
                        "unknown; replace it with its value"
                    )
                else:
                    self.uses.append(OptionUse(word, "unknown", "expected an option"))
                continue
            head, sign, text = word.partition("=")
            head, _, key = head.partition(".") if head.startswith("-") else (head, "", "")
            if short := _level(head):
                head, sign, text = short[0], "=", short[1]
            found = self.server.find(head, negatable=self.spec.has_negatable_flags)
            if found is None:
                self._unknown(word, words)
                continue
            name, kind, off = found
            values = [text] if sign else self._values(word, kind, words)
            shown = join_words([head + (f".{key}" if key else ""), *values])
            if name == "--config" and values:
                self._require_value(shown)
                given = [*self._file(values[0]), *given]
                self.uses.append(OptionUse(shown, "used"))
            elif kind == "switch":
                self._check_switch(word, head, name, values)
                given.append(_Given(shown, name, not off, key))
            else:
                read = [parse_option_value(value) for value in values]
                value = read[0] if len(read) == 1 and kind != "list" else read
                given.append(_Given(shown, name, value, key))
        return given, model

    def _merged(self, given: list[_Given]) -> list[_Given]:
        """Merge keys of a JSON option, such as ``--speculative-config.method``, into one option."""
        merged: dict[str, _Given] = {}
        found: list[_Given] = []
        for one in given:
            name, key = self.server.parts.get(one.name, (one.name, one.key))
            whole = merged.get(name)
            if not key or name not in self.server.converted:
                found.append(one)
                if isinstance(one.value, dict):
                    merged[name] = one
            elif whole is None:
                merged[name] = _Given(one.text, name, _nested(key, one.value))
                found.append(merged[name])
            else:
                whole.text += f" {one.text}"
                whole.value = _joined(whole.value, _nested(key, one.value))
        return found

    def _values(self, word: str, kind: str, words: list[str]) -> list[str]:
        """Remove the values of an option from ``words`` and return these values."""
        if kind == "switch":
            return []
        values: list[str] = []
        while words and not _is_option(words[0]):
            values.append(words.pop(0))
            if kind != "list":
                break
        if not values:
            raise InputError(f"{self.option}: {word}: expected a value")
        return values

    def _check_switch(self, word: str, head: str, name: str, values: list[str]) -> None:
        """Raise InputError if a switch has a value. The parsers of the servers reject values."""
        if not values:
            return
        hint = f"expected {head} without a value"
        if parse_option_value(values[0]) is False:
            negated = self.spec.has_negatable_flags and name == head
            hint = f"expected --no-{name[2:]}" if negated else f"remove {head}"
        raise InputError(
            f"{self.option}: {word}: the server rejects a value of this option; {hint}"
        )

    def _unknown(self, word: str, words: list[str]) -> None:
        """Record an option that no release has. Raises InputError if it looks like a typo."""
        hint = self.server.hint(word.partition("=")[0])
        if hint:
            raise InputError(f"{self.option}: {word}: no release has this option{hint}")
        while words and not _is_option(words[0]):
            word += f" {words.pop(0)}"
        reason = "no modelled release has this option"
        self.uses.append(OptionUse(_without_secret(word), "unknown", reason))

    def _file(self, name: str) -> Iterator[_Given]:
        """Yield the options in a configuration file, whose keys are the names of options."""
        path = Path(name)
        document = read_document(path)
        for key, value in document.tree.items():
            found = self.server.find(f"--{key}", negatable=False)
            text = f"{key}: {value} ({path.name})"
            if found is None:
                self.uses.append(OptionUse(text, "unknown", "no modelled release has this option"))
            elif value is not None:
                yield _Given(text, found[0], value)

    def _take(self, one: _Given) -> None:
        """Set the fields that an option sets, or record the reason if there are none."""
        server = self.server
        if self._has_effect(one.name):
            self._require_value(one.text)
        if one.name in server.model:
            self._use(one, {}, "used")
            return
        if one.name in (server.tp, server.dp):
            self._use(one, {}, "used")
            return
        try:
            found = self._converted(one)
        except NotModelled as error:
            self._use(one, {}, "not modelled", str(error))
            return
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{self.option}: {one.text}: the value is not valid") from error
        if found is not None:
            self._use(one, found, "used")
        elif (reason := server.reason(one.name)) and not self._is_neutral(one):
            self._use(one, {}, "not modelled", reason)
        else:
            self._use(one, {}, "ignored")

    def _has_effect(self, name: str) -> bool:
        """Return whether an option sets a field, the model or the number of GPUs."""
        server = self.server
        return (
            name in (*server.model, server.tp, server.dp)
            or name in server.converted
            or (name, "") in _fields_by_flag(self.spec)
        )

    def _require_value(self, text: str) -> None:
        """Raise InputError if the text refers to a variable that has no value."""
        if variable := unset_variable(text):
            raise InputError(f"{self.option}: {text}: {without_value(variable)}")

    def _converted(self, one: _Given) -> Mapping[str, Any] | None:
        """Return the values of the fields that an option sets, or None if it sets no field."""
        by_key = _fields_by_flag(self.spec)
        value = one.value
        if one.name in self.server.converted:
            return self.server.converted[one.name](value)
        if (one.name, "") in by_key:
            return {f"engine.{by_key[one.name, '']}": value}
        return None

    def _is_neutral(self, one: _Given) -> bool:
        off = one.value is False
        return off or str(one.value) in self.server.neutral.get(one.name, ())

    def _use(self, one: _Given, found: Mapping[str, Any], effect: Effect, reason: str = "") -> None:
        self.fields |= found
        text = _without_secret(one.text)
        self.uses.append(OptionUse(text, effect, reason, tuple(found), one.name))

    def _place_ranks(self, values: Mapping[str, Any], model: str | None) -> None:
        """Set hardware and fleet from the tensor and data parallelism in the launch line."""
        sizes = [values.get(name, 1) for name in (self.server.tp, self.server.dp)]
        for name, size in zip((self.server.tp, self.server.dp), sizes, strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InputError(f"{self.option}: {name} {size}: expected a whole number")
        ranks = RankOptions(sizes[0], sizes[1], has_experts(model), values)
        try:
            found = dict(self.server.ranks(ranks))
        except NotModelled as error:
            raise InputError(f"{self.option}: {error}") from error
        if self.server.tp not in values and found.get("hardware.tp") == 1:
            del found["hardware.tp"]
        self.fields |= found

    def _variable(self, name: str, value: str) -> None:
        by_name = {
            source.name: field
            for field, source in sources(self.spec.config).items()
            if not isinstance(source, Flag)
        }
        if name in by_name or name in self.server.variables:
            self._require_value(f"{name}={value}")
        if name in by_name:
            path = f"engine.{by_name[name]}"
            self.fields[path] = parse_option_value(value)
            self.uses.append(OptionUse(f"{name}={value}", "used", fields=(path,)))
        elif name in self.server.variables:
            try:
                found = self.server.variables[name](parse_option_value(value))
            except NotModelled as error:
                self.uses.append(OptionUse(f"{name}={value}", "not modelled", str(error)))
                return
            self.fields |= found
            self.uses.append(OptionUse(f"{name}={value}", "used", fields=tuple(found)))
        else:
            secret = name.upper().split("_")[-1] in _SECRET_WORDS
            shown = f"${name}" if secret and value else value
            self.uses.append(OptionUse(f"{name}={shown}", "ignored"))


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return the mapping with a value at a dotted key. A key with ``+`` adds to a list."""
    if key.endswith("+"):
        values = value if isinstance(value, list) else str(value).split(",")
        key, value = key[:-1], [parse_option_value(str(one)) for one in values]
    for part in reversed(key.split(".")):
        value = {part.replace("-", "_"): value}
    return dict(value)


def _joined(base: Any, more: Any) -> Any:
    """Return two JSON values as one; mappings are merged by key, and lists are appended."""
    if isinstance(base, list) and isinstance(more, list):
        return [*base, *more]
    if not isinstance(base, dict) or not isinstance(more, dict):
        return more
    return {**base, **{key: _joined(base.get(key), value) for key, value in more.items()}}


def has_experts(model: str | None) -> bool:
    """Return whether a model of the catalog is a mixture of experts; False for an unknown model."""
    try:
        return bool(model and find_architecture(model).experts)
    except InputError:
        return False


def _is_option(word: str) -> bool:
    """Return whether a word is an option. A negative number such as -1 is not."""
    return word.startswith("-") and len(word) > 1 and not word[1:].replace(".", "", 1).isdigit()


def _level(head: str) -> tuple[str, str] | None:
    """Return the option and the value of a word such as ``-O3``."""
    if len(head) == 3 and head[0] == "-" and head[1].isupper() and head[2].isdecimal():
        return head[:2], head[2]
    return None


def _fields_by_flag(spec: EngineSpec) -> dict[tuple[str, str], str]:
    """Return the fields of an engine's config, by command-line flag and by key of the flag's JSON
    value.
    """
    return {
        (source.name, source.key): name
        for name, source in sources(spec.config).items()
        if isinstance(source, Flag) and not source.unit
    }


def option_fields(spec: EngineSpec) -> dict[str, str]:
    """Return the fields of an engine's config, by the names of the options in the engine's logs."""
    return {
        source.name.strip("-").replace("-", "_"): name
        for name, source in sources(spec.config).items()
        if isinstance(source, Flag)
    }
