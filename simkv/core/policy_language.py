"""Custom policies as data: expressions that replace some decisions of an engine.

policy = parse_policy("waiting_order = prompt_tokens - 8 * age; admit = free > 0.1", hooks)
policy["waiting_order"](view) # value for the request that a view describes

An expression consists of numbers, names, + - * /, < and >, ``a if b else c``, min and max. An
expression can read only the listed names, so untrusted policies are safe to run. Division by 0
yields 0.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from simkv.core.errors import spelling_hint

#: Variables of a request in an expression.
REQUEST_VARIABLES: Mapping[str, str] = {
    "age": "seconds between its arrival and the arrival of the newest request",
    "prompt_tokens": "prompt tokens",
    "tokens": "tokens so far, prompt and output",
    "blocks": "number of KV blocks",
    "preemptions": "number of preemptions",
    "priority": "priority; smaller is more urgent",
    "bucket": "length class: number of binary digits of its token count",
}
#: Variables of the engine; they are available in expressions that do not compare two requests.
ENGINE_VARIABLES: Mapping[str, str] = {
    "free": "fraction of the blocks that are free",
    "running": "number of running requests",
    "waiting": "number of waiting requests",
}
#: Variables that change from step to step even if all requests only decode.
CHANGING_VARIABLES = frozenset(("tokens", "blocks", "bucket", "free"))
GRAMMAR = "numbers, names, + - * /, < and >, a if b else c, min(a, b) and max(a, b)"
#: Limits on the size of an expression; larger expressions are rejected.
MAX_NODES, MAX_TEXT_LENGTH = 400, 4000
#: Larger numbers in an expression are rejected as typos.
MAX_NUMBER = 1e9

#: Meaning of an expression's value. ``order``: the smallest value is first; ``group``: requests
#: with equal values are together; ``test``: true if above 0; ``tokens``: a number of tokens.
HookResult = Literal["order", "group", "test", "tokens"]


@dataclass(frozen=True)
class PolicyHook:
    """Decision that a custom policy can replace.

    ``sort`` states how the value of the expression is used. ``default_rule`` describes the decision
    of the engine itself.
    """

    name: str
    sort: HookResult
    description: str
    default_rule: str

    @property
    def names(self) -> tuple[str, ...]:
        """Variables that the expression can use."""
        if self.sort == "tokens":
            return tuple(ENGINE_VARIABLES)
        return (*REQUEST_VARIABLES, *(ENGINE_VARIABLES if self.sort == "test" else ()))


@dataclass(frozen=True)
class PolicyExpression:
    """Expression over the variables of a request or the engine.

    - ``names``: variables in the expression.
    - ``python``: equivalent Python expression.
    """

    # ``python`` reads the variables as attributes of a view ``r``.

    text: str
    names: frozenset[str]
    call: Callable[[Any], float]
    python: str

    def __call__(self, view: Any) -> float:
        """Return the value of the expression. NaN is replaced by 0."""
        value = self.call(view)
        return value if value == value else 0.0

    @property
    def moves(self) -> bool:
        """Whether the value of the expression can change during decode-only steps."""
        return bool(self.names & CHANGING_VARIABLES)


CustomPolicy = Mapping[str, PolicyExpression]


@lru_cache(maxsize=4096)
def parse_policy(text: str | None, hooks: tuple[PolicyHook, ...]) -> CustomPolicy:
    """Return the expressions of a policy by hook name.

    Lines have the form ``hook = expression``. Raises ValueError if the text is invalid.
    """
    # Lines may also be separated by ``;``.
    known = {hook.name: hook for hook in hooks}
    found: dict[str, PolicyExpression] = {}
    if len(text or "") > MAX_TEXT_LENGTH:
        raise ValueError(
            f"rule: has {len(text or ''):,} characters; expected at most {MAX_TEXT_LENGTH:,}"
        )
    for line in (text or "").replace(";", "\n").splitlines():
        if not line.strip():
            continue
        name, equals, expression = (part.strip() for part in line.partition("="))
        if not equals or name not in known:
            listed = ", ".join(known)
            raise ValueError(
                f"rule: {line.strip()!r}: expected HOOK = EXPRESSION with HOOK one of {listed}"
                f"{spelling_hint(name, known)}"
            )
        if name in found:
            raise ValueError(f"rule: {name}: defined twice")
        found[name] = parse_expression(expression, known[name].names, f"rule: {name}")
    return found


def parse_expression(text: str, names: Sequence[str], where: str) -> PolicyExpression:
    """Parse an expression over the variables ``names``.

    Raises ValueError if the expression is invalid. The message starts with ``where``.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: {text!r} is not a valid expression: {error}") from error
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ValueError(
            f"{where}: the expression is too long; expected at most {MAX_NODES} names, numbers "
            "and operators"
        )
    used: set[str] = set()
    body = _checked(tree, names, used, where)
    view = ast.arguments([], [ast.arg("r")], None, [], [], None, [])
    whole = ast.fix_missing_locations(ast.Expression(ast.Lambda(view, body)))
    scope = {"__builtins__": {}, "min": min, "max": max, "_over": _over}
    call = eval(compile(whole, where, "eval"), scope)
    return PolicyExpression(text, frozenset(used), call, ast.unparse(body))


def _over(a: float, b: float) -> float:
    return a / b if b else 0.0


def _checked(node: ast.expr, names: Sequence[str], used: set[str], where: str) -> ast.expr:
    """Return the syntax tree with attributes for variables, floats for numbers and safe
    divisions.
    """

    def inner(one: ast.expr) -> ast.expr:
        return _checked(one, names, used, where)

    match node:
        case ast.Constant():
            return ast.Constant(_number(node.value, where))
        case ast.Name(id=name):
            used.add(_known(name, names, where))
            return ast.Attribute(ast.Name("r", ast.Load()), name, ast.Load())
        case ast.UnaryOp(op=ast.USub()):
            return ast.UnaryOp(node.op, inner(node.operand))
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
            return ast.BinOp(inner(node.left), node.op, inner(node.right))
        case ast.BinOp(op=ast.Div()):
            return _call("_over", [inner(node.left), inner(node.right)])
        case ast.Compare(ops=[ast.Lt() | ast.Gt()], comparators=[right]):
            return ast.Compare(inner(node.left), node.ops, [inner(right)])
        case ast.IfExp():
            return ast.IfExp(inner(node.test), inner(node.body), inner(node.orelse))
        case ast.Call(func=ast.Name(id="min" | "max" as which), args=[_, _], keywords=[]):
            return _call(which, [inner(one) for one in node.args])
    raise ValueError(f"{where}: {ast.unparse(node)!r}: expected {GRAMMAR}")


def _known(name: str, names: Sequence[str], where: str) -> str:
    if name not in names:
        raise ValueError(
            f"{where}: unknown name {name!r}{spelling_hint(name, names)}; expected one of "
            f"{', '.join(names)}"
        )
    return name


def _call(name: str, given: list[ast.expr]) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), given, [])


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
        raise ValueError(f"{where}: {value!r}: expected a number up to {MAX_NUMBER:g}")
    return float(value)
