"""Tests of the policy language: valid expressions, and rejection of all others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from simkv.core.policy_language import (
    ENGINE_VARIABLES,
    MAX_NODES,
    REQUEST_VARIABLES,
    PolicyHook,
    parse_expression,
    parse_policy,
)

SEAMS = (PolicyHook("order", "order", "", ""), PolicyHook("admit", "test", "", ""))
NAMES = (*REQUEST_VARIABLES, *ENGINE_VARIABLES)
SEEN = SimpleNamespace(age=4.0, prompt_tokens=100.0, tokens=110.0, free=0.25, running=0.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("prompt_tokens - 8 * age", 68.0),
        ("-age / running", 0.0),
        ("min(age, 3) + max(tokens, 1)", 113.0),
        ("1 if free < 0.5 else 2", 1.0),
        ("free > 0.5", 0.0),
        (
            "1e9 * 1e9 * 1e9 * 1e9 * 1e9 * 1e9 * 1e9 * 1e9 * 1e9 * 1e9 * " * 4 + "1 - age",
            float("inf"),
        ),
    ],
)
def test_evaluates_expressions_over_a_view(text: str, value: float) -> None:
    assert parse_expression(text, NAMES, "rule")(SEEN) == value


def test_nan_evaluates_to_zero() -> None:
    endless = "1e9 * " * 40 + "1"
    assert parse_expression(f"({endless}) - ({endless})", NAMES, "rule")(SEEN) == 0.0


def test_expression_lists_its_variables() -> None:
    rule = parse_policy("order = prompt_tokens; admit = free > 0.1", SEAMS)
    assert {name: one.names for name, one in rule.items()} == {
        "order": {"prompt_tokens"},
        "admit": {"free"},
    }
    assert (rule["order"].moves, rule["admit"].moves) == (False, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("order", "expected HOOK = EXPRESSION"),
        ("ordr = age", "did you mean 'order'?"),
        ("order = age; order = age", "defined twice"),
        ("order = ", "is not a valid expression"),
        ("order = agee", "did you mean 'age'?"),
        ("order = free", "unknown name 'free'"),
        ("order = output_tokens", "unknown name 'output_tokens'"),
        ("order = age.__class__", "expected numbers, names"),
        ("order = __import__('os')", "expected numbers, names"),
        ("order = max(age)", "expected numbers, names"),
        ("order = 'a'", "expected a number"),
        ("order = True", "expected a number"),
        ("order = 1e10", "expected a number up to"),
        ("order = 1 < age < 2", "expected numbers, names"),
        ("order = age ** 2", "expected numbers, names"),
        ("order = (lambda: 1)()", "expected numbers, names"),
        ("order = " + "-" * MAX_NODES + "age", "too long"),
        ("order = " + "(" * 3000, "not a valid expression"),
        ("order = age" + " " * 5000, "characters"),
    ],
)
def test_rejects_invalid_policies(text: str, told: str) -> None:
    with pytest.raises(ValueError, match="rule") as caught:
        parse_policy(text, SEAMS)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
