"""Genetic programming over the policy language: random policies, crossover and mutation.

Example:

    with PolicyGenerator(engine.policy_hooks, seed=1) as generator:
        rule = generator.sample()
        other = generator.mutate(rule)
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from simkv.core.errors import InputError
from simkv.core.policy_language import HookResult, PolicyHook

#: A policy: an expression tree for each hook, by the name of the hook.
PolicyTrees = dict[str, Any]
#: Format of an operation and its number of operands.
OPERATIONS = {
    "add": ("({0} + {1})", 2),
    "sub": ("({0} - {1})", 2),
    "mul": ("({0} * {1})", 2),
    "div": ("({0} / {1})", 2),
    "least": ("min({0}, {1})", 2),
    "most": ("max({0}, {1})", 2),
    "choice": ("({2} if {0} < {1} else {3})", 4),
}
#: Constants in expressions; other numbers result from arithmetic.
NUMBERS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
MAX_TREE_DEPTH = 5
#: Probability that a random test compares a variable with a number.
THRESHOLD_PROBABILITY = 0.5
#: Probability that a random policy has an expression for a given hook.
HOOK_PROBABILITY = 0.4


class PolicyGenerator:
    """Generator of random, crossed and mutated policies, with its own random numbers.

    Must be used as a context manager.
    """

    def __init__(self, hooks: Sequence[PolicyHook], seed: int) -> None:
        try:
            from deap import gp
        except ImportError as error:
            raise InputError(
                "simkv evolve: DEAP is not installed; run pip install 'simkv[search]'"
            ) from error
        self._gp = gp
        self.policy_hooks = hooks
        self._hooks = [hook.name for hook in hooks]
        self._sorts = {hook.name: hook.sort for hook in hooks}
        self._sets = {hook.name: _primitives(gp, hook) for hook in hooks}
        self._own_state = random.Random(seed).getstate()
        self._global_state: Any = None

    def __enter__(self) -> Self:
        self._global_state = random.getstate()
        random.setstate(self._own_state)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._own_state = random.getstate()
        random.setstate(self._global_state)

    def sample(self) -> PolicyTrees:
        """Return a random policy with an expression for at least one hook."""
        said = [name for name in self._hooks if random.random() < HOOK_PROBABILITY]
        return {name: self._tree(name) for name in said or [random.choice(self._hooks)]}

    def crossover(self, one: PolicyTrees, other: PolicyTrees) -> PolicyTrees:
        """Return a policy; each expression comes from one parent or is a crossover of both."""
        child: PolicyTrees = {}
        for name in self._hooks:
            ours, theirs = one.get(name), other.get(name)
            if ours is not None and theirs is not None and random.random() < 0.5:
                child[name] = self._low(self._gp.cxOnePoint(_copy(ours), _copy(theirs))[0], ours)
            elif (chosen := random.choice((ours, theirs))) is not None:
                child[name] = _copy(chosen)
        return child or self.sample()

    def mutate(self, rule: PolicyTrees) -> PolicyTrees:
        """Return the policy with one expression mutated, added or removed."""
        child = {name: _copy(tree) for name, tree in rule.items()}
        name = random.choice(self._hooks)
        if name not in child:
            child[name] = self._tree(name)
        elif len(child) > 1 and random.random() < 0.25:
            del child[name]
        else:
            gp, pset = self._gp, self._sets[name]
            ways: list[Callable[[Any], tuple[Any, ...]]] = [
                partial(gp.mutUniform, expr=partial(gp.genFull, min_=0, max_=2), pset=pset),
                partial(gp.mutNodeReplacement, pset=pset),
                gp.mutShrink,
                lambda _: (self._tree(name),),
            ]
            child[name] = self._low(random.choice(ways)(_copy(child[name]))[0], child[name])
        return child

    def choose(self, among: Sequence[int]) -> int:
        """Return one of the given numbers at random."""
        return random.choice(among)

    def chance(self, share: float) -> bool:
        """Return True with probability ``share``."""
        return random.random() < share

    def _tree(self, name: str) -> Any:
        gp, pset = self._gp, self._sets[name]
        if self._sorts[name] == "test" and random.random() < THRESHOLD_PROBABILITY:
            return self._threshold(pset)
        return gp.PrimitiveTree(gp.genHalfAndHalf(pset, min_=0, max_=2))

    def _threshold(self, pset: Any) -> Any:
        """Return a random comparison of a variable with a number."""
        leaves = pset.terminals[pset.ret]
        numbers = {f"{number:g}" for number in NUMBERS}
        pair = [
            random.choice([leaf for leaf in leaves if leaf.name not in numbers]),
            random.choice([leaf for leaf in leaves if leaf.name in numbers]),
        ]
        random.shuffle(pair)
        return self._gp.PrimitiveTree([pset.mapping["sub"], *pair])

    def _low(self, tree: Any, otherwise: Any) -> Any:
        return tree if tree.height <= MAX_TREE_DEPTH else _copy(otherwise)


def _copy(tree: Any) -> Any:
    return type(tree)(tree)


def _primitives(gp: Any, hook: PolicyHook) -> Any:
    """Return the DEAP primitives for expressions of a hook: operations, variables and numbers."""
    pset = gp.PrimitiveSet(hook.name, 0)
    for name, (form, arity) in OPERATIONS.items():
        pset.addPrimitive(len, arity, name=name)
        pset.mapping[name].seq = form
    for name in hook.names:
        pset.addTerminal(name, name=name)
    for number in NUMBERS:
        pset.addTerminal(number, name=f"n{number:g}")
        pset.mapping[f"n{number:g}"].name = f"{number:g}"
    return pset


def format_policy(trees: PolicyTrees, hooks: Sequence[PolicyHook]) -> str:
    """Return a policy as text for a scenario, with each expression simplified."""
    sorts = {hook.name: hook.sort for hook in hooks}
    return "\n".join(
        f"{name} = {simplify_for_hook(simplify(_text(tree)), sorts[name])}"
        for name, tree in sorted(trees.items())
    )


def _text(tree: Sequence[Any]) -> str:
    parts = iter(tree)

    def next_one() -> str:
        node = next(parts)
        operands = [next_one() for _ in range(node.arity)]
        return str(node.seq.format(*operands)) if operands else str(node.name)

    return next_one()


def simplify(text: str) -> str:
    """Return the expression with constant parts computed and operations without effect removed."""
    return ast.unparse(ast.fix_missing_locations(_Simplest().visit(ast.parse(text, mode="eval"))))


def simplify_for_hook(text: str, sort: HookResult) -> str:
    """Return a shorter expression that leads to equal decisions.

    ``sort`` is the kind of value that the hook expects. For example, the factor of a sort key is
    removed.
    """
    node = ast.parse(text, mode="eval").body
    value = _value(node)
    if value is not None and sort == "tokens":
        return str(max(int(value), 0))
    if value is not None:
        return "1" if sort == "test" and value > 0 else "0"
    if sort in ("order", "group"):
        while (inner := _within(node)) is not None:
            node = inner
        return "0" if _value(node) is not None else ast.unparse(node)
    return text


def _within(node: ast.expr) -> ast.expr | None:
    """Return the operand if the expression only shifts or scales it by a constant, or None."""
    if not isinstance(node, ast.BinOp):
        return None
    ours, theirs = _value(node.left), _value(node.right)
    match node.op:
        case ast.Add() if ours is not None:
            return node.right
        case ast.Add() | ast.Sub() if theirs is not None:
            return node.left
        case ast.Mult() if ours is not None and ours > 0:
            return node.right
        case ast.Mult() | ast.Div() if theirs is not None and theirs > 0:
            return node.left
    return None


class _Simplest(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        ours, theirs = _value(node.left), _value(node.right)
        if ours is not None and theirs is not None:
            return _constant(_done(node.op, ours, theirs))
        match node.op, ours, theirs:
            case (ast.Add() | ast.Sub(), _, 0.0) | (ast.Mult() | ast.Div(), _, 1.0):
                return node.left
            case (ast.Add(), 0.0, _) | (ast.Mult(), 1.0, _):
                return node.right
            case (ast.Mult(), 0.0, _) | (ast.Mult(), _, 0.0) | (ast.Div(), 0.0, _):
                return _constant(0.0)
            case (ast.Div(), _, 0.0):
                return _constant(0.0)
            case (ast.Sub(), _, _) if ast.dump(node.left) == ast.dump(node.right):
                return _constant(0.0)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        one, other = node.args
        ours, theirs = _value(one), _value(other)
        if ast.dump(one) == ast.dump(other):
            return one
        if ours is not None and theirs is not None:
            least = isinstance(node.func, ast.Name) and node.func.id == "min"
            return _constant((min if least else max)(ours, theirs))
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if ast.dump(node.body) == ast.dump(node.orelse):
            return node.body
        test = node.test
        if isinstance(test, ast.Compare):
            ours, theirs = _value(test.left), _value(test.comparators[0])
            if ours is not None and theirs is not None:
                return node.body if ours < theirs else node.orelse
            if ast.dump(test.left) == ast.dump(test.comparators[0]):
                return node.orelse
        return node


def _value(node: ast.expr) -> float | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        return -float(node.operand.value)  # type: ignore[arg-type]
    return float(node.value) if isinstance(node, ast.Constant) else None  # type: ignore[arg-type]


def _constant(value: float) -> ast.expr:
    short = float(f"{value:.6g}")
    number = ast.Constant(abs(int(short)) if short == int(short) else abs(short))
    return ast.UnaryOp(ast.USub(), number) if short < 0 else number


def _done(op: ast.operator, a: float, b: float) -> float:
    if isinstance(op, ast.Add):
        return a + b
    if isinstance(op, ast.Sub):
        return a - b
    return a * b if isinstance(op, ast.Mult) else a / b if b else 0.0


#: Syntax nodes that count towards the length of a policy.
COUNTED_NODES = (ast.Name, ast.Constant, ast.BinOp, ast.IfExp, ast.Call, ast.Compare, ast.UnaryOp)


def count_parts(rule: str) -> int:
    """Return the number of names, numbers and operations in a policy."""
    expressions = [line.partition("=")[2].strip() for line in rule.splitlines()]
    trees = [ast.parse(text, mode="eval") for text in expressions]
    return sum(isinstance(node, COUNTED_NODES) for tree in trees for node in ast.walk(tree))
