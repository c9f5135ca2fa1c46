"""Tests of the router that admits whole sessions."""

from __future__ import annotations

from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.scenario.fleet_section import SessionAdmissionConfig
from simkv.sim.fleet.session_admission import SessionAdmission
from tests.sim.fleet.test_fleet import ends, fleet, where


def admission(capacity: int = 100, **settings: Any) -> SessionAdmission:
    """Return a router without buffers whose sessions are the priorities of requests."""
    settings = {"buffer_tokens": 0, **settings}
    config = SessionAdmissionConfig(capacity_tokens=capacity, **settings)
    return SessionAdmission(config, lambda prompt: prompt.priority)


def turn(request_id: int, session: int, tokens: int) -> Prompt:
    return Prompt(request_id, tokens, 1, priority=session)


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in prompts]


def test_holds_sessions_that_do_not_fit() -> None:
    router = admission()
    assert router.admits(turn(0, 0, 60), [0])
    assert not router.admits(turn(1, 1, 60), [0])
    assert not router.admits(turn(2, 2, 10), [0]), "fits, but another session is paused"
    assert ids(router.check(5.0)) == [2], "the smaller one fits"
    assert router.admits(turn(3, 2, 20), [0]), "later turns of admitted sessions pass"


def test_requests_that_were_never_offered_change_nothing() -> None:
    """The client of a request can leave before any replica is ready."""
    router = admission()
    router.ended(turn(0, 0, 60), 60, 1.0)
    assert router.admits(turn(1, 1, 90), [0])
    router.ended(turn(2, 1, 10), 10, 2.0)
    assert not router.admits(turn(3, 2, 30), [0]), "session 1 still needs 90 tokens"


def test_contexts_of_idle_sessions_decay() -> None:
    for half_life, resumed in ((None, []), (1.0, [1])):
        router = admission(half_life=half_life)
        assert router.admits(turn(0, 0, 60), [0])
        assert not router.admits(turn(1, 1, 60), [0])
        router.ended(turn(0, 0, 60), 62, 3.0)
        assert ids(router.check(3.0)) == []
        assert ids(router.check(8.0)) == resumed


def test_pauses_the_smallest_idle_session_and_resumes_it_first() -> None:
    router = admission()
    for session, tokens in ((0, 50), (1, 30), (2, 10)):
        assert router.admits(turn(session, session, tokens), [0])
        router.ended(turn(session, session, tokens), tokens, 1.0)
    assert router.admits(turn(3, 0, 75), [0])
    assert router.check(5.0) == []
    assert not router.admits(turn(4, 2, 20), [0]), "75 + 30 + 10 > 100: the smallest is paused"
    assert not router.admits(turn(5, 1, 31), [0]), "75 + 30 > 100: so is the next"
    assert not router.admits(turn(6, 3, 1), [0])
    router.ended(turn(3, 0, 75), 40, 6.0)
    assert ids(router.check(10.0)) == [5, 4, 6], "all fit; the largest is placed first"


def test_busy_sessions_are_paused_at_their_next_answer() -> None:
    router = admission(first_estimate=0.5)
    assert router.admits(turn(0, 0, 80), [0])
    assert router.admits(turn(1, 1, 80), [0]), "estimated as 40 tokens"
    router.ended(turn(0, 0, 80), 80, 1.0)
    assert router.admits(turn(2, 0, 80), [0])
    assert router.check(5.0) == []
    router.ended(turn(2, 0, 80), 80, 6.0)
    router.ended(turn(1, 1, 80), 80, 6.0)
    assert not router.admits(turn(3, 0, 80), [0])
    assert not router.admits(turn(4, 1, 80), [0])
    assert ids(router.check(10.0)) == [3]


def test_largest_session_goes_to_the_replica_with_most_room() -> None:
    router = admission()
    assert router.admits(turn(0, 0, 70), [0, 1])
    assert router.admits(turn(1, 1, 50), [0, 1])
    assert not router.admits(turn(2, 2, 60), [0, 1])
    router.ended(turn(1, 1, 50), 20, 1.0)
    assert ids(router.check(5.0)) == [2]
    placed = [router.choose(turn(i, i, 1), []) for i in range(3)]
    assert placed == [0, 1, 1]


def sessions(router: dict[str, Any] | str, *times: float) -> Any:
    requests = [
        {"arrival": time, "prompt_tokens": 50, "output_tokens": 4, "prefix_group": f"s{i}"}
        | {"prefix_tokens": 40}
        for i, time in enumerate(times)
    ]
    return fleet({"replicas": 2, "router": router}, requests)


def test_held_requests_are_sent_at_last() -> None:
    settings = {"capacity_tokens": 54, "buffer_tokens": 0, "forced_after": 12}
    result = sessions({"name": "session_admission", **settings}, 0, 0, 0.5)
    assert ends(result) == [4.0, 4.0, 16.5], "the contexts of ended sessions always count"
    decaying = sessions({"name": "session_admission", **settings, "half_life": 0.1}, 0, 0, 0.5)
    assert ends(decaying) == [4.0, 4.0, 9.0], "resumed at 5 s"
    assert where(decaying)[:2] == ["0", "1"]


def test_ample_capacity_holds_nothing() -> None:
    ample = sessions({"name": "session_admission", "capacity_tokens": 10_000}, 0, 1, 2, 30)
    assert ends(ample) == ends(sessions("round_robin", 0, 1, 2, 30))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"failures": [{"replica": 0, "at": 1}]}, "failures: cannot be combined with the router"),
        ({"router": "session_admission"}, "capacity_tokens"),
    ],
)
def test_unsupported_settings_are_rejected(section: dict[str, Any], message: str) -> None:
    router = {"name": "session_admission", "capacity_tokens": 100}
    with pytest.raises(InputError, match=message):
        fleet({"replicas": 2, "router": router, **section}, [{"prompt_tokens": 1}])


def test_sessions_of_a_dead_replica_are_held_until_another_has_room() -> None:
    router = admission()
    assert router.admits(turn(0, 0, 70), [0, 1])
    assert router.admits(turn(1, 1, 60), [0, 1])
    router.forget(0)
    assert not router.admits(turn(0, 0, 70), [1])
    router.ended(turn(1, 1, 60), 20, 1.0)
    assert ids(router.check(5.0)) == [0]
    assert router.choose(turn(0, 0, 70), []) == 1
