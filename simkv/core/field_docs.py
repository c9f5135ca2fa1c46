"""What is told of the fields of a class: the text that stands under each.

class VllmConfig:
    block_size: int = 16
    '''Tokens in a block of KV.'''

told(VllmConfig)["block_size"]  # "Tokens in a block of KV."

Editors show such texts, ``simkv schema`` and the reference pages are made of them. They are
documentation only: nothing may depend on their words. What a program needs to know of a field is
declared in its annotation (flags.py).
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache


def read_field_docs(one: type[object]) -> dict[str, str]:
    """The text under each field of a class, those of its bases before its own; by field."""
    found: dict[str, str] = {}
    for base in reversed(one.__mro__):
        if base.__module__.startswith("simkv."):
            found |= _classes(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _classes(module: str) -> dict[str, dict[str, str]]:
    """The texts under the fields of all classes of a module; none if its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {node.name: _fields(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, under in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(under, ast.Expr)
            and isinstance(under.value, ast.Constant)
            and isinstance(under.value.value, str)
        ):
            found[field.target.id] = " ".join(under.value.value.split())
    return found
