"""Tests of sampling, crossover and mutation of policies."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.policy_language import (
    ENGINE_VARIABLES,
    REQUEST_VARIABLES,
    parse_expression,
    parse_policy,
)
from simkv.schedulers.engine_registry import ENGINES
from simkv.study.evolve.genetic_operators import (
    PolicyGenerator,
    count_parts,
    format_policy,
    simplify,
    simplify_for_hook,
)

pytest.importorskip("deap")
NAMES = (*REQUEST_VARIABLES, *ENGINE_VARIABLES)
LEAF = st.sampled_from(["age", "tokens", "free", "0.0", "1.0", "2", "0.5", "-0.5"])
TREE = st.recursive(
    LEAF,
    lambda inner: st.tuples(
        st.sampled_from(
            [
                "({0} + {1})",
                "({0} - {1})",
                "({0} * {1})",
                "({0} / {1})",
                "min({0}, {1})",
                "max({0}, {1})",
                "({0} if {0} < {1} else {1})",
                "({1} if {0} < {0} else {0})",
            ]
        ),
        inner,
        inner,
    ).map(lambda one: one[0].format(*one[1:])),
    max_leaves=9,
)


@given(TREE, *[st.sampled_from([0.0, 1.0, 3.5, 40.0])] * 3)
def test_simplify_preserves_value(text: str, age: float, tokens: float, free: float) -> None:
    seen = SimpleNamespace(age=age, tokens=tokens, free=free)
    value = parse_expression(text, NAMES, "rule")(seen)
    short = parse_expression(simplify(text), NAMES, "rule")
    assert short(seen) == pytest.approx(value, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("(age - age)", "0"),
        ("((age * 1) + 0)", "age"),
        ("(2 / 0)", "0"),
        ("min(3, 0.5)", "0.5"),
        ("(1 - 3)", "-2"),
        ("(tokens if 1 < 2 else age)", "tokens"),
        ("(tokens / tokens)", "tokens / tokens"),
    ],
)
def test_simplify_removes_neutral_operations(text: str, short: str) -> None:
    assert simplify(text) == short


@pytest.mark.parametrize(
    ("text", "sort", "short"),
    [
        ("7", "order", "0"),
        ("7", "group", "0"),
        ("7", "test", "1"),
        ("-7", "test", "0"),
        ("7", "tokens", "7"),
        ("0.1", "tokens", "0"),
        ("age * 2 + 3", "order", "age"),
        ("age * -2 + 3", "order", "age * -2"),
        ("3 - age", "order", "3 - age"),
        ("0.5 * (tokens / 10)", "group", "tokens"),
        ("free * 2", "test", "free * 2"),
    ],
)
def test_equivalent_expressions_have_one_form(text: str, sort: Any, short: str) -> None:
    assert simplify_for_hook(text, sort) == short


@pytest.mark.parametrize("engine", ["mistralrs", "vllm"])
def test_generated_trees_are_valid_policies(engine: str) -> None:
    hooks = ENGINES[engine].policy_hooks
    with PolicyGenerator(hooks, 3) as generator:
        rules = [generator.sample() for _ in range(60)]
        rules += [generator.crossover(a, b) for a, b in pairwise(rules)]
        rules += [generator.mutate(rule) for rule in rules]
    texts = {format_policy(rule, hooks) for rule in rules}
    assert len(texts) > 100
    for text in texts:
        parse_policy(text, hooks)
        assert count_parts(text) >= 1
    assert {name for rule in rules for name in rule} == {hook.name for hook in hooks}


def test_generator_leaves_global_random_state() -> None:
    def drawn(seed: int) -> list[str]:
        with PolicyGenerator(ENGINES["vllm"].policy_hooks, seed) as generator:
            return [
                format_policy(generator.sample(), ENGINES["vllm"].policy_hooks) for _ in range(5)
            ]

    random.seed(1)
    first = random.random()
    random.seed(1)
    assert drawn(4) == drawn(4) != drawn(5)
    assert random.random() == first
