"""Read YAML files as plain data, with the line of every value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy, deepcopy
from math import log10
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scanner import RoundTripScanner, Scanner

from simkv.core.errors import InputError
from simkv.core.input_files import read_bytes

#: Limits on the size of a file, on the number of values after aliases are resolved, and on the
#: nesting depth. The reader needs seven seconds for a megabyte of short values.
MAX_BYTES = 1 << 20
MAX_VALUES = 2_000_000
MAX_DEPTH = 100
#: Largest allowed integer; larger integers do not fit into the arrays of a simulation.
LARGEST = 10**18
#: Length above which an assignment is shortened in messages.
SHOWN = 200
#: A number with more digits than Python accepts.
_TOO_LONG = re.compile(r"\d[\d_]{4000}")


class _Shallow(Scanner):
    """Scanner that rejects deep nesting, which would take half a minute to read."""

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: Any) -> None:
        self._check(len(self.flow_context))
        super().fetch_flow_collection_start(TokenClass, to_push)

    def add_indent(self, column: int) -> bool:
        self._check(len(self.indents))
        return bool(super().add_indent(column))

    def _check(self, depth: int) -> None:
        if depth >= MAX_DEPTH:
            mark = self.reader.get_mark()
            raise MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH}", problem_mark=mark)


class _ShallowWithLines(_Shallow, RoundTripScanner):
    """Scanner that rejects deep nesting and preserves lines and comments."""


def _reader(*, lines: bool) -> YAML:
    reader = YAML(typ="rt" if lines else "safe", pure=True)
    reader.Scanner = _ShallowWithLines if lines else _Shallow
    return reader


class YamlDocument:
    """A YAML file as plain data (``tree``), with the origin of each value.

    The origin is a line of the file, or a command-line option.
    """

    def __init__(self, path: Path, data: Any) -> None:
        self.path = path
        self.tree = data
        self.given_by: dict[tuple[str, ...], str] = {}

    def copy(self) -> YamlDocument:
        """Return an independent copy."""
        other = YamlDocument(self.path, deepcopy(self.tree))
        other.given_by = dict(self.given_by)
        return other

    def override(self, assignment: str, option: str = "--set") -> None:
        """Apply a ``path=value`` assignment from the command-line option ``option``.

        Raises InputError if it is invalid.
        """
        given = f"{option} {assignment[:SHOWN]}{'…' if len(assignment) > SHOWN else ''}"
        target, equals, text = assignment.partition("=")
        keys = target.strip().split(".")
        if not equals or not all(keys):
            raise InputError(f"{given}: expected path=value, as in engine.block_size=16")
        try:
            value = _reader(lines=False).load(text)
        except Exception as error:  # the reader raises many kinds of errors for invalid input
            raise InputError(f"{given}: the value is not valid YAML") from error
        _count_values(given, value)
        node = self.tree
        for depth, key in enumerate(keys[:-1]):
            known = find_key(node, key)
            if known is None and not isinstance(node, dict):
                raise InputError(f"{given}: {'.'.join(keys[:depth])} has no fields")
            child = None if known is None else node[known]
            # Copy the node, because an alias in another place may refer to it.
            child = {} if child is None else copy(child)
            node[key if known is None else known] = child
            node = child
        if isinstance(node, list):
            index = int(keys[-1]) if keys[-1].isdecimal() else -1
            if not 0 <= index < len(node):
                raise InputError(f"{given}: expected an index from 0 to {len(node) - 1}")
            node[index] = value
        elif isinstance(node, dict):
            known = find_key(node, keys[-1])
            node[keys[-1] if known is None else known] = value
        else:
            raise InputError(f"{given}: {'.'.join(keys[:-1])} has no fields")
        self.given_by[tuple(keys)] = given

    def place(self, location: Sequence[str | int]) -> str:
        """Return ``file:line`` or the option for the value at ``location``, or for its nearest
        parent.
        """
        keys = tuple(str(part) for part in location)
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.given_by:
                return self.given_by[keys[:length]]
        line, node = 1, self.tree
        for part in location:
            positions = getattr(node, "lc", None)
            here = find_key(node, part)
            if here is None or positions is None or positions.data is None:
                break
            if here in positions.data:
                line = positions.data[here][0] + 1
            node = node[here]
        has_lines = getattr(self.tree, "lc", None) is not None
        return f"{self.path}:{line}" if has_lines else str(self.path)


def find_key(node: Any, part: str | int) -> Any:
    """Return the key or index in ``node`` that ``part`` refers to, or None."""
    if isinstance(node, dict):
        return next((key for key in node if str(key) == str(part)), None)
    if isinstance(node, list) and str(part).isdecimal() and int(part) < len(node):
        return int(part)
    return None


def read_document(path: Path) -> YamlDocument:
    """Read a YAML file. Raises InputError with the line of the error."""
    raw = read_bytes(path, MAX_BYTES)
    try:
        data = _reader(lines=True).load(raw.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InputError(
            f"{path}:{line}: not valid YAML: {error.problem or error.context}"
        ) from error
    except RecursionError as error:
        raise InputError(f"{path}:1: nested too deeply") from error
    except ReaderError as error:
        line = raw.decode().count("\n", 0, error.position) + 1
        raise InputError(f"{path}:{line}: not valid YAML: {error.reason}") from error
    except ValueError as error:
        text = raw.decode()
        long = _TOO_LONG.search(text)
        line = text.count("\n", 0, long.start()) + 1 if long else 1
        reason = "a number has too many digits" if long else str(error).partition("\n")[0]
        raise InputError(f"{path}:{line}: not valid YAML: {reason}") from error
    except Exception as error:  # the reader raises many kinds of errors for invalid input
        text = raw.decode()
        if isinstance(error, AttributeError) and (merged := text.find("<<")) >= 0:
            line = text.count("\n", 0, merged) + 1
            raise InputError(
                f"{path}:{line}: a merge key (<<) must name a mapping that ends before it"
            ) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path}:1: not valid YAML: {reason}") from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else "a list" if isinstance(data, list) else repr(data)
        raise InputError(f"{path}:1: must be a mapping of fields, got {found}")
    _count_values(str(path), data)
    return YamlDocument(path, data)


def _count_values(source: str, data: Any) -> None:
    """Reject a file in which aliases expand to too many values (a "YAML bomb") or contain
    themselves.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def place(node: Any) -> str:
        position = getattr(node, "lc", None)
        return source if position is None else f"{source}:{position.line + 1}"

    def size(node: Any) -> int:
        if not isinstance(node, dict | list):
            return 1
        if id(node) in open_nodes:
            raise InputError(f"{place(node)}: an alias contains itself")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            _check_numbers(source, node)
            values = node.values() if isinstance(node, dict) else node
            sizes[id(node)] = 1 + sum(size(value) for value in values)
            open_nodes.discard(id(node))
            if sizes[id(node)] > MAX_VALUES:
                raise InputError(
                    f"{place(node)}: aliases expand to more than {MAX_VALUES:,} values"
                )
        return sizes[id(node)]

    try:
        _check_numbers(source, [data])
        size(data)
    except RecursionError as error:
        raise InputError(f"{source}: nested too deeply") from error


def _check_numbers(source: str, node: dict[Any, Any] | list[Any]) -> None:
    """Reject integers beyond ``LARGEST`` in the keys and values of a node."""
    position = getattr(node, "lc", None)
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        for number in (key, value):
            if isinstance(number, int) and abs(number) > LARGEST:
                lines = getattr(position, "data", None) or {}
                line = f":{lines[key][0] + 1}" if key in lines else ""
                field = f"{key}: " if isinstance(key, str) else ""
                raise InputError(
                    f"{source}{line}: {field}should be a whole number of at most 18 digits; "
                    f"found a number with about {int(number.bit_length() * log10(2)) + 1:,} "
                    "digits"
                )
