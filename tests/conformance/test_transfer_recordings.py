"""Recordings with KV of other replicas: what each rule of it decides shows in some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.transfer_scheduler import VllmTransferScheduler
from tests.conformance.recordings import of_kind

RECORDINGS = of_kind("vllm", "0.33.0", "pd")


def test_there_are_forty_that_send_and_load_and_preempt() -> None:
    traces = [recording.trace() for recording in RECORDINGS]
    assert len(traces) == 40
    for field in ("loads", "sends", "preempted", "aborted"):
        assert sum(any(line.get(field) for line in trace.steps) for trace in traces) >= 5
    configs = [trace.header["config"] for trace in traces]
    assert len({(c["async_scheduling"], c["policy"]) for c in configs}) == 4
    assert {c["kv_role"] for c in configs} == {"kv_producer", "kv_consumer", "kv_both"}


def _all_but_the_last(self: Any, r: Any, step: Any) -> Any:
    """As before this was recorded: the last token of a prompt is not loaded."""
    r.length -= 1
    turn = LOAD(self, r, step)
    r.length += 1
    return turn


LOAD = VllmTransferScheduler._load

# ruff: noqa: E501
MUTATIONS: list[tuple[str, str, Callable[..., Any]]] = [
    ("the last token of a prompt is not loaded", "_load", _all_but_the_last),
    ("blocks are free when a request ends", "keep", lambda s, i: None),
    ("who is aborted keeps blocks, too", "abort", lambda s, i: (setattr(s, "_ending", True), VllmScheduler.abort(s, i), setattr(s, "_ending", False))),
    ("those whose KV is there have no blocks", "_fits", VllmScheduler._fits),
    ("nobody is told who will not load", "_remove", lambda s, r: (s._elsewhere.discard(r.id), REMOVE(s, r))),
]  # fmt: skip

REMOVE = VllmTransferScheduler._remove


@pytest.mark.parametrize(
    ("method", "rule"),
    [case[1:] for case in MUTATIONS],
    ids=[case[0] for case in MUTATIONS],
)
def test_a_changed_rule_is_noticed(
    method: str, rule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmTransferScheduler, method, rule)
    assert any(recording.differs() for recording in RECORDINGS)
