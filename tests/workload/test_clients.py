"""Tests of clients whose requests depend on earlier replies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.workload.clients import Clients, Dependency
from simkv.workload.workload_section import Workload, build_clients, generate_requests


def request(number: int, arrival: float = 0.0, timeout: float | None = None) -> Request:
    return Request(number, 10, 5, arrival=arrival, output_tokens=5, timeout=timeout)


def ids(sent: list[Request]) -> list[int]:
    return [r.id for r in sent]


def test_open_clients_send_every_request_at_its_arrival() -> None:
    requests = [request(0, 0.1), request(1, 0.1), request(2, 3.0)]
    some = Clients(requests)
    assert some.open
    assert some.next_time() == 0.1
    assert some.send(0.0) == []
    assert some.send(0.1) == requests[:2]
    assert (some.next_time(), ids(some.unsent)) == (3.0, [2])
    assert some.send(5.0) == [requests[2]]
    assert (some.next_time(), some.unsent) == (None, [])


def test_client_at_its_limit_queues_requests_in_order() -> None:
    some = Clients([request(i, i / 10) for i in range(4)], max_concurrency=2)
    assert ids(some.send(0.0)) == [0]
    assert ids(some.send(0.35)) == [1]
    assert some.send(0.35) == []
    some.ended(1, 2.0)
    (late,) = some.send(2.0)
    assert (late.id, late.arrival) == (2, 2.0)
    assert some.queued(2) == pytest.approx(1.8)
    some.ended(0, 2.5, answered=False)
    assert ids(some.send(2.5)) == [3]
    assert some.queued(0) == 0.0


def test_turn_is_sent_after_the_previous_answer_and_think_time() -> None:
    some = Clients(
        [request(0), request(1), request(2)], {1: Dependency((0,), 2.5), 2: Dependency((1,), 0.0)}
    )
    assert not some.open
    assert ids(some.send(0.0)) == [0]
    assert some.next_time() is None
    some.ended(0, 4.0)
    assert some.next_time() == 6.5
    (second,) = some.send(6.5)
    assert (second.id, second.arrival) == (1, 6.5)
    some.ended(1, 7.0)
    assert some.next_time() == 7.0
    assert ids(some.send(7.0)) == [2]


def test_session_ends_if_a_request_gets_no_answer() -> None:
    some = Clients([request(0), request(1)], {1: Dependency((0,), 1.0)})
    some.send(0.0)
    some.ended(0, 3.0, answered=False)
    assert some.next_time() is None
    assert ids(some.unsent) == [1]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=25),
    st.integers(1, 4),
)
def test_slots_are_never_exceeded_nor_idle_while_requests_wait(
    drawn: list[tuple[int, int]], slots: int
) -> None:
    """The test loops over the clients' own times, and serves each request in a fixed time."""
    requests = [request(i, float(time)) for i, (time, _) in enumerate(drawn)]
    some = Clients(requests, max_concurrency=slots)
    serving: dict[int, float] = {}
    now = 0.0
    while some.unsent or serving:
        for sent in some.send(now):
            assert sent.arrival == now
            serving[sent.id] = now + drawn[sent.id][1]
        assert len(serving) <= slots
        waiting = [r for r in some.unsent if r.arrival <= now]
        assert not waiting or len(serving) == slots
        following = [*serving.values(), *([some.next_time()] if some.next_time() else [])]
        if not following:
            break
        now = min(time for time in following if time is not None)
        for number in [number for number, end in serving.items() if end <= now]:
            del serving[number]
            some.ended(number, now)
    order = sorted(requests, key=lambda r: (r.arrival, r.id))
    assert [r.id for r in order] == list(some.sent)


def test_rejects_generating_requests_that_depend_on_service() -> None:
    burst = {"num_prompts": 9, "prompt_tokens": 5, "output_tokens": 2}
    closed = Workload.model_validate({"burst": burst, "max_concurrency": 3})
    with pytest.raises(InputError, match="max_concurrency"):
        generate_requests(closed, None)
    some = build_clients(closed, 30.0)
    assert len(some.send(0.0)) == 3
    assert {r.timeout for r in some.requests} == {30.0}
    opened = Workload.model_validate({"burst": burst})
    assert build_clients(opened, None).requests == generate_requests(opened, None)


def race(**options: Any) -> Clients:
    """Return clients of three branches (1; 2, then 3; 4), of which request 5 needs the first."""
    after = {
        1: Dependency((0,), 0.0),
        2: Dependency((0,), 0.0),
        3: Dependency((2,), 1.0),
        4: Dependency((0,), 0.0),
        5: Dependency((1, 3, 4), 2.0, first_wins=True),
    }
    some = Clients([request(i) for i in range(6)], after, **options)
    some.send(0.0)
    some.ended(0, 1.0)
    return some


def test_first_branch_starts_the_next_request_and_cancels_the_others() -> None:
    some = race()
    assert ids(some.send(1.0)) == [1, 2, 4]
    some.ended(2, 2.0)
    some.ended(4, 2.5)
    assert some.take_cancelled() == [1]  # in flight; 3 is due at 3 s and is never sent
    assert some.take_cancelled() == []
    assert some.cancelled == {1, 3}
    some.ended(1, 2.5, answered=False)
    assert some.send(3.0) == []
    assert some.next_time() == 4.5
    assert ids(some.send(4.5)) == [5]
    assert ids(some.unsent) == [3]


def test_requests_that_wait_in_the_client_are_cancelled() -> None:
    some = race(max_concurrency=1)
    assert ids(some.send(1.0)) == [1]
    some.ended(1, 2.0)
    assert some.take_cancelled() == []
    assert some.send(2.0) == []
    assert some.cancelled == {2, 3, 4}
    assert ids(some.send(4.0)) == [5]


def test_branches_that_end_at_the_same_time_are_not_cancelled() -> None:
    some = race()
    some.send(1.0)
    some.ended(1, 2.0)
    some.ended(4, 2.0)
    assert some.take_cancelled() == [2]
    assert some.cancelled == {2, 3}


def test_a_branch_without_an_answer_does_not_win() -> None:
    some = race()
    some.send(1.0)
    some.ended(1, 2.0, answered=False)
    assert some.take_cancelled() == []
    some.ended(4, 5.0)
    assert some.next_time() == 7.0


def test_a_branch_that_another_request_needs_is_not_cancelled() -> None:
    after = {2: Dependency((0, 1), 0.0, first_wins=True), 3: Dependency((1,), 0.0)}
    some = Clients([request(i) for i in range(4)], after)
    some.send(0.0)
    some.ended(0, 1.0)
    assert some.cancelled == set()


def test_a_session_with_cancelled_branches_ends() -> None:
    session = race()
    some = Clients([*session.requests, request(6)], session.after, max_sessions=1)
    assert ids(some.send(0.0)) == [0]
    some.ended(0, 1.0)
    assert ids(some.send(1.0)) == [1, 2, 4]
    some.ended(2, 1.5)  # request 3 is due
    some.ended(1, 2.0)
    assert some.take_cancelled() == [4]
    some.ended(4, 2.0, answered=False)
    assert ids(some.send(4.0)) == [5]
    assert ids(some.send(9.0)) == []
    some.ended(5, 9.0)
    assert ids(some.send(9.0)) == [6]


def test_a_cancelled_first_request_does_not_hold_its_session_open() -> None:
    after = {2: Dependency((0, 1), 0.0, first_wins=True)}
    requests = [request(i) for i in range(4)]
    some = Clients(requests, after, max_concurrency=1, max_sessions=1)
    assert ids(some.send(0.0)) == [0]  # request 1 waits in the client
    some.ended(0, 1.0)
    assert some.cancelled == {1}
    assert ids(some.send(1.0)) == [2]
    some.ended(2, 2.0)
    assert ids(some.send(2.0)) == [3], "the first session has not ended"


def test_all_first_requests_of_a_session_start_with_it() -> None:
    after = {3: Dependency((1, 2), 0.0)}
    requests = [request(0), request(1, 1.0), request(4, 2.0), request(2, 3.0), request(3)]
    some = Clients(requests, after, max_sessions=1)
    assert ids(some.send(4.0)) == [0]
    some.ended(0, 5.0)
    assert ids(some.send(5.0)) == [1, 2], "request 2 waits behind the session of request 4"
    assert some.started[2] == 5.0
