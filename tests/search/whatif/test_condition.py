from __future__ import annotations

from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.scenario.expect import Expectations
from simkv.search.whatif.condition import STALLED, VERDICTS, IsVerdict, condition
from simkv.search.whatif.evaluate import evaluate, trial
from tests.search.whatif.cases import overload, queue_loop


def test_every_verdict_is_a_condition() -> None:
    for word in VERDICTS:
        wanted = condition(word)
        assert isinstance(wanted, IsVerdict)
        assert wanted.words == (word,)
        assert wanted.outcome in set(Outcome)
    assert condition("Engine-Died") == condition("engine died")


def test_stalled_is_any_standstill() -> None:
    wanted = condition("stalled")
    assert isinstance(wanted, IsVerdict)
    assert wanted.words == STALLED
    assert wanted.outcome == "stalled"
    assert wanted.shows(evaluate(trial(queue_loop(), Path())))
    assert not wanted.shows(evaluate(trial(overload(), Path())))


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
def test_a_bound_on_a_figure(text: str, shown: bool) -> None:
    figures = evaluate(trial(overload(), Path()))
    assert figures["starved"] == 4
    wanted = condition(text)
    assert wanted.shows(figures) is shown
    Expectations.model_validate(wanted.expectation(figures))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("straved", "did you mean 'starved'"),
        ("", "is not a verdict"),
        ("preemption>=1", "did you mean 'preemptions'"),
        ("preemptions>=1e999", "'1e999' is not a number"),
        ("preemptions>=-", "'-' is not a number"),
        ("preemptions>1", "is not a verdict"),
    ],
)
def test_what_is_no_condition(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        condition(text, "--when")
    assert str(caught.value).startswith(f"--when {text}: ")
