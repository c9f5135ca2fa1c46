"""Find the words of a server's launch line in a shell command, a script or a compose file.

For example, the words of ``FOO=1 docker run -e BAR=2 vllm/vllm-openai:v0.11.0 --model M`` are
``--model M``; the environment variables and the version in the image's tag are returned separately.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.input_files import read_text
from simkv.core.server_options import LaunchOptions
from simkv.scenario.yaml_document import read_document
from simkv.schedulers.engine_registry import ENGINES

#: Assignment of a variable: before a command, after ``export``, or after ``docker run -e``.
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
#: Reference to a variable, with an optional default.
_REFERENCE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
#: Assignment of a bash array, or words that are appended to it.
_ARRAY = re.compile(
    r"^[ \t]*(?:(?:declare -a|local -a|local|readonly)[ \t]+)?(\w+)(\+?)=\(([^()]*)\)[ \t]*;?",
    re.MULTILINE,
)
_SEPARATORS = ";&|<>()\n"
#: Programs that start a command without the variables of the shell.
_CONTAINERS = ("docker", "podman", "nerdctl")
#: Options of ``docker run`` that set an environment variable.
_SETS_VARIABLE = ("-e", "--env")


@dataclass(frozen=True)
class LaunchWords:
    """Words of a launch line after the program.

    ``variables`` are the environment variables that the line sets.
    """

    engine: str
    words: tuple[str, ...]
    version: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def find_launch_words(text: str, option: str = "--from-command") -> LaunchWords:
    """Return the words of the launch line in a command, or in the file that ``text`` names.

    A file is a shell script or a compose file (``.yaml`` or ``.yml``). ``FILE:SERVICE`` selects a
    service of a compose file. Raises InputError unless there is exactly one launch line.
    """
    file, _, service = text.rpartition(":")
    if _is_file(text):
        file, service = text, ""
    if _is_file(file):
        source, found = f"{option} {text}", _in_file(Path(file), service)
    else:
        source, found = option, list(_in_script(text, option))
    if len(found) == 1:
        return found[0]
    known = [
        " ".join(program)
        for options in _servers().values()
        for program in (*options.programs, *(("python", "-m", one) for one in options.modules))
    ]
    if not found and source == option and _is_path(text):
        raise InputError(f"{option} {text}: this file does not exist")
    if not found:
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise InputError(
            f"{source}: no launch command of a server in {shown!r}; expected "
            f"{', '.join(known)}, or docker run with an image of one of these servers"
        )
    raise InputError(f"{source}: contains {len(found)} launch commands; expected one")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a long command cannot be a file name
        return False


def _is_path(text: str) -> bool:
    """Return whether a text is one word that looks like the path of a script or compose file."""
    return bool(re.fullmatch(r"\S*/\S*|\S+\.(sh|bash|ya?ml)(:\S+)?", text, re.IGNORECASE))


def _servers() -> dict[str, LaunchOptions]:
    return {name: spec.server_options for name, spec in ENGINES.items() if spec.server_options}


def _in_file(path: Path, service: str) -> list[LaunchWords]:
    if path.suffix.lower() in (".yaml", ".yml"):
        return _in_compose(path, service)
    return list(_in_script(read_text(path), str(path)))


def _in_compose(path: Path, wanted: str) -> list[LaunchWords]:
    """Return the launch lines of a compose file's services."""
    services = read_document(path).tree.get("services")
    if not isinstance(services, dict):
        raise InputError(f"{path}: services: missing; expected a compose file")
    if wanted and wanted not in services:
        raise InputError(
            f"{path}: no service {wanted!r}; expected one of {', '.join(map(str, services))}"
        )
    found: dict[str, LaunchWords] = {}
    for name, service in services.items():
        if not isinstance(service, dict) or (wanted and name != wanted):
            continue
        variables = _variables(service.get("environment"))
        words = [
            _expanded(word, variables)
            for part in ("entrypoint", "command")
            for word in _listed(service.get(part))
        ]
        image = _expanded(str(service.get("image", "")), variables)
        launch = _of_words([image, *words], variables)
        if launch:
            if variable := unset_variable(image):
                raise InputError(f"{path}: services.{name}.image: {without_value(variable)}")
            found[str(name)] = launch
    if len(found) > 1:
        raise InputError(
            f"{path}: contains {len(found)} servers; choose one of them: "
            f"{', '.join(f'{path}:{name}' for name in found)}"
        )
    return list(found.values())


def _variables(section: Any) -> dict[str, str]:
    """Return the environment of a service, which is a mapping or a list of assignments."""
    if isinstance(section, dict):
        return {str(name): str(value) for name, value in section.items() if value is not None}
    pairs = (str(one).partition("=") for one in section or ())
    return {name: value for name, sign, value in pairs if sign}


def _listed(command: Any) -> list[str]:
    if command is None:
        return []
    return [str(one) for one in command] if isinstance(command, list) else _split(str(command))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise InputError(f"{text[:60]!r}: not a valid command: {str(error).lower()}") from error


def _in_script(text: str, source: str) -> Iterator[LaunchWords]:
    """Yield the launch lines among the commands of a script."""
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    release = None
    for command in _commands(_without_arrays(text), source):
        words = [_expanded(word, variables) for word in command]
        exports = words[:1] == ["export"]
        plain = words[1:] if words[:1] in (["export"], ["set"]) else words
        if plain and (exports or all(_ASSIGNMENT.fullmatch(word) for word in plain)):
            variables |= dict(word.split("=", 1) for word in plain if "=" in word)
            names = [word.partition("=")[0] for word in plain] if exports else exported
            exported |= {name: variables[name] for name in names if name in variables}
            continue
        in_container = any(word.rsplit("/", 1)[-1] in _CONTAINERS for word in words)
        launch = _of_words(words, {} if in_container else exported)
        if launch:
            own = dict(launch.variables)
            yield LaunchWords(launch.engine, launch.words, launch.version or release, own)
        else:
            release = next(filter(None, (_stated(word) for word in words)), release)


def _without_arrays(text: str) -> str:
    """Return a script with references to its bash arrays replaced by the words of the arrays."""
    arrays: dict[str, str] = {}
    parts: list[str] = []
    end = 0

    def expanded(part: str) -> str:
        for name, words in arrays.items():
            reference = rf'"?\$\{{{name}\[[@*]\]\}}"?'
            part = re.sub(reference, words.replace("\\", "\\\\"), part)
        return part

    for match in _ARRAY.finditer(text):
        parts.append(expanded(text[end : match.start()]))
        end = match.end()
        lines = (re.sub(r"(^|\s)#.*", "", line) for line in match[3].splitlines())
        words = expanded(" ".join(lines).replace("\\", " "))
        arrays[match[1]] = f"{arrays.get(match[1], '')} {words}" if match[2] else words
    return "".join([*parts, expanded(text[end:])])


def _commands(text: str, source: str) -> Iterator[list[str]]:
    """Yield the words of each simple command; redirections are left out."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    words: list[str] = []
    redirects = False
    while True:
        try:
            word = lexer.get_token()
        except ValueError as error:
            raise InputError(f"{source}: not a valid command: {str(error).lower()}") from error
        if word is None:
            break
        if set(word) <= set(_SEPARATORS):
            if set(word) & set("<>"):
                redirects = True
                words = words[:-1] if words and words[-1].isdecimal() else words
                continue
            if words:
                yield words
            words, redirects = [], False
        elif redirects:
            redirects = False
        else:
            words.append(word)
    if words:
        yield words


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace references to variables by their values; references to unset variables remain."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name]
        return match[0] if match[2] is None else str(match[2])

    return _REFERENCE.sub(value, text)


def unset_variable(text: str) -> str | None:
    """Return the first variable in a word of a launch line that has no value, or None."""
    match = _REFERENCE.search(text)
    return (match[1] or match[3]) if match else None


def without_value(variable: str) -> str:
    """Return the message for a variable that has no value."""
    return f"the variable ${variable} has no value; replace it with its value"


def join_words(words: Sequence[str]) -> str:
    """Return words as a shell command. A shell still expands words like ``${NAME}``."""
    return " ".join(
        f'"{word}"' if _REFERENCE.fullmatch(word) else shlex.quote(word) for word in words
    )


def _of_words(words: Sequence[str], variables: Mapping[str, str]) -> LaunchWords | None:
    """Return the launch line in the words of one command, or None."""
    release: str | None = None
    own = dict(variables)
    serving: tuple[str, int] | None = None
    for place, word in enumerate(words):
        if (match := _ASSIGNMENT.fullmatch(word)) and not word.startswith("-"):
            own[match[1]] = match[2]
            continue
        release = _stated(word) or release
        for name, options in _servers().items():
            if length := _starts(words, place, options):
                return LaunchWords(name, tuple(words[place + length :]), release, own)
            if serving is None and _is_image(word, options.images):
                release = _tag(word) or release
                if _is_image(word, options.serving_images):
                    serving = name, place + 1
        if any(space in word for space in " \n") and not word.startswith("-"):
            inner = next(_in_script(word, "the command"), None)
            if inner is not None:
                merged = {**own, **inner.variables}
                return LaunchWords(inner.engine, inner.words, inner.version or release, merged)
    if serving is None:
        return None
    return LaunchWords(serving[0], tuple(words[serving[1] :]), release, own)


def _starts(words: Sequence[str], place: int, options: LaunchOptions) -> int:
    """Return the number of words at ``place`` that start the server, or 0."""
    word = words[place].rsplit("/", 1)[-1]
    for program in options.programs:
        here = (re.split("==|@", word)[0], *words[place + 1 : place + len(program)])
        if here == program:
            return len(program)
    if words[place] == "-m" and place + 1 < len(words) and words[place + 1] in options.modules:
        return 2
    return 0


def _is_image(word: str, images: Sequence[str]) -> bool:
    plain = word.partition("@")[0]
    name = plain.rpartition(":")[0] if ":" in plain.rsplit("/", 1)[-1] else plain
    return any(name == image or name.endswith(f"/{image}") for image in images)


def _tag(image: str) -> str | None:
    """Return the version in the tag of an image, such as v0.11.0 or v0.5.20-cu129."""
    match = re.search(r":v?(\d+\.\d+(?:\.\d+)?(?:\.post\d+)?)", image)
    return match[1] if match else None


def _stated(word: str) -> str | None:
    """Return the version in a requirement such as vllm==0.11.0, or None."""
    names = "|".join(map(re.escape, _servers()))
    match = re.fullmatch(rf"(?:{names})(?:\[[\w,-]+\])?(?:==|@)v?(\d[\w.+]*)", word)
    return match[1] if match else None
