"""Find the mutants of a module; each mutant changes one expression or statement of a function."""

from __future__ import annotations

import ast
import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Add, ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: Code whose change affects no behavior, or only messages.
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """A change of one node of a module.

    ``key`` is the file, the function, and the code before and after; ``start`` and ``end`` are the
    byte positions of the code in the file, and ``after`` is the code that replaces it.
    """

    key: str
    line: int
    start: int
    end: int
    after: str

    def apply(self, source: bytes) -> bytes:
        """Return the source of the module with this change."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def find_mutants(name: str, source: bytes) -> list[Mutant]:
    """Return the mutants of the module with this file name, in the order of the source."""
    lines = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found, seen = [], Counter[str]()
    for scope, old, new in _changes(ast.parse(source), ""):
        before, after = ast.unparse(old), ast.unparse(new)
        key = f"{name} {scope}: {before} -> {after}"
        seen[key] += 1
        key += f" #{seen[key]}" if seen[key] > 1 else ""
        start = lines[old.lineno - 1] + old.col_offset
        end = lines[(old.end_lineno or old.lineno) - 1] + (old.end_col_offset or 0)
        after = f"({after})" if isinstance(new, ast.expr) else after
        found.append(Mutant(key, old.lineno, start, end, after))
    return found


def _changes(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """Yield the function, the old node and the new node of each mutant below ``node``."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}".lstrip(".")
    if isinstance(node, ast.expr | ast.stmt) and (new := _replacement(node, scope)):
        yield scope, node, new
    if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(
        node.test, ast.Name | ast.Attribute | ast.Call
    ):
        yield scope, node.test, ast.UnaryOp(ast.Not(), node.test)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST) and not isinstance(inner, SKIPPED):
                yield from _changes(inner, scope)


def _replacement(node: ast.expr | ast.stmt, scope: str) -> Any:
    """Return the node that replaces ``node``, or None if no operator applies."""
    match node:
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() if type(node.op) in SWAPPED:
            new = copy.copy(node)
            new.op = SWAPPED[type(node.op)]()
            return new
        case ast.Compare(left, [op], right) if type(op) in SWAPPED:
            return ast.Compare(left, [SWAPPED[type(op)]()], right)
        case ast.Break() | ast.Continue():
            return SWAPPED[type(node)]()
        case ast.Expr(ast.Call()) | ast.Assign([ast.Attribute() | ast.Subscript()]):
            return None if scope.endswith("__init__") else ast.Pass()
    return _other_value(node)


def _other_value(node: ast.expr | ast.stmt) -> ast.AST | None:
    match node:
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.Call(ast.Name(name), args, keywords) if name in SWAPPED_NAMES:
            return ast.Call(ast.Name(SWAPPED_NAMES[name]), args, keywords)
        case ast.IfExp(test, body, orelse):
            return ast.IfExp(test, orelse, body)
    return None
