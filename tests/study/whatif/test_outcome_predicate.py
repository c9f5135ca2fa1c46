from __future__ import annotations

from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.scenario.expectations import Expectations
from simkv.study.whatif.outcome_predicate import (
    STALLED,
    VERDICTS,
    VerdictCondition,
    parse_condition,
)
from simkv.study.whatif.trial_evaluation import evaluate_job, make_trial_job
from tests.study.whatif.known_verdicts import overload, queue_loop


def test_every_verdict_is_condition() -> None:
    for word in VERDICTS:
        wanted = parse_condition(word)
        assert isinstance(wanted, VerdictCondition)
        assert wanted.words == (word,)
        assert wanted.outcome in set(Outcome)
    assert parse_condition("Engine-Died") == parse_condition("engine died")


def test_stalled_covers_all_halts() -> None:
    wanted = parse_condition("stalled")
    assert isinstance(wanted, VerdictCondition)
    assert wanted.words == STALLED
    assert wanted.outcome == "stalled"
    assert wanted.is_met(evaluate_job(make_trial_job(queue_loop(), Path())))
    assert not wanted.is_met(evaluate_job(make_trial_job(overload(), Path())))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("starved>=4", True),
        ("starved >= 5", False),
        ("starved<=4", True),
        ("starved<=3", False),
        ("starved=4", True),
        ("starved==3", False),
        ("e2e_ms.mean>=17499.9999999", True),
        ("e2e_ms.mean=17500", True),
        ("e2e_ms.mean=17500.1", False),
    ],
)
def test_figure_bounds(text: str, shown: bool) -> None:
    figures = evaluate_job(make_trial_job(overload(), Path()))
    assert figures["starved"] == 4
    wanted = parse_condition(text)
    assert wanted.is_met(figures) is shown
    Expectations.model_validate(wanted.expectation(figures))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("straved", "did you mean 'starved'"),
        ("", "unknown verdict"),
        ("preemption>=1", "did you mean 'preemptions'"),
        ("preemptions>=1e999", "'1e999' is not a number"),
        ("preemptions>=-", "'-' is not a number"),
        ("preemptions>1", "unknown verdict"),
    ],
)
def test_rejects_invalid_conditions(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_condition(text, "--when")
    assert str(caught.value).startswith(f"--when {text}: ")
