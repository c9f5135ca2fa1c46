"""What is told of the fields of a class: the text that stands under each.

class VllmConfig:
    block_size: int = 16
    '''Tokens in a block of KV. [--block-size]'''

told(VllmConfig)["block_size"]  # Told("Tokens in a block of KV.", "--block-size")

Editors show such texts, ``simkv schema`` and the reference pages are made of them.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from typing import NamedTuple

_SOURCE = re.compile(r"\s*\[([^\[\]]+)\]$")


class Told(NamedTuple):
    """What a field is for, in a line, and where that is from: a flag, a file or a pull request."""

    text: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.text} [{self.source}]" if self.source else self.text


def told(one: type[object]) -> dict[str, Told]:
    """The text under each field of a class, those of its bases before its own; by field."""
    found: dict[str, Told] = {}
    for base in reversed(one.__mro__):
        if base.__module__.startswith("simkv."):
            found |= _classes(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _classes(module: str) -> dict[str, dict[str, Told]]:
    """The texts under the fields of all classes of a module; none if its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {node.name: _fields(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> dict[str, Told]:
    found = {}
    for field, under in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(under, ast.Expr)
            and isinstance(under.value, ast.Constant)
            and isinstance(under.value.value, str)
        ):
            found[field.target.id] = _told(under.value.value)
    return found


def _told(text: str) -> Told:
    line = " ".join(text.split())
    source = _SOURCE.search(line)
    return Told(line[: source.start()], source[1]) if source else Told(line)
