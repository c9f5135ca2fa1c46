"""Descriptions of the fields of a class: the string literal under each field.

    class VllmConfig:
        block_size: int = 16
        '''Tokens in a block of KV.'''

    read_field_docs(VllmConfig)["block_size"]  # "Tokens in a block of KV."

Editors, ``simkv schema`` and the reference pages show these texts. They are documentation only: no
behavior may depend on their words. Facts that a program needs are declared in the annotation of the
field (``engine_flags.py``).
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache


def read_field_docs(one: type[object]) -> dict[str, str]:
    """Return the text under each field of a class, by field name.

    The fields of base classes come first.
    """
    found: dict[str, str] = {}
    for base in reversed(one.__mro__):
        if base.__module__.startswith("simkv."):
            found |= _classes(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _classes(module: str) -> dict[str, dict[str, str]]:
    """Return, for each class of a module, its field texts; empty if the source is unavailable."""
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
