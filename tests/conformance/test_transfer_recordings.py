"""Tests of recordings with KV from other replicas: every rule of this feature affects at least
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.transfer_scheduler import VllmTransferScheduler
from tests.conformance.recordings import of_kind

RECORDINGS = of_kind("vllm", "0.33.0", "pd")


def test_recordings_cover_sends_loads_and_preemptions() -> None:
    traces = [recording.trace() for recording in RECORDINGS]
    assert len(traces) == 40
    for field in ("loads", "sends", "preempted", "aborted"):
        assert sum(any(line.get(field) for line in trace.steps) for trace in traces) >= 5
    configs = [trace.header["config"] for trace in traces]
    assert len({(c["async_scheduling"], c["policy"]) for c in configs}) == 4
    assert {c["kv_role"] for c in configs} == {"kv_producer", "kv_consumer", "kv_both"}


def _all_but_the_last(self: Any, r: Any, step: Any) -> Any:
    """Load all tokens of a prompt except the last, as simkv did before these recordings."""
    r.length -= 1
    turn = LOAD(self, r, step)
    r.length += 1
    return turn


LOAD = VllmTransferScheduler._load

# ruff: noqa: E501
MUTATIONS: list[tuple[str, str, Callable[..., Any]]] = [
    ("the last token of a prompt is not loaded", "_load", _all_but_the_last),
    ("blocks are free when a request ends", "keep", lambda s, i: None),
    ("aborted requests keep blocks", "abort", lambda s, i: (setattr(s, "_ending", True), VllmScheduler.abort(s, i), setattr(s, "_ending", False))),
    ("requests whose KV has arrived have no blocks", "_fits", VllmScheduler._fits),
    ("removals are not reported to the sender", "_remove", lambda s, r: (s._elsewhere.discard(r.id), REMOVE(s, r))),
]  # fmt: skip

REMOVE = VllmTransferScheduler._remove


@pytest.mark.parametrize(
    ("method", "rule"),
    [case[1:] for case in MUTATIONS],
    ids=[case[0] for case in MUTATIONS],
)
def test_a_changed_rule_changes_decisions(
    method: str, rule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmTransferScheduler, method, rule)
    assert any(recording.differs() for recording in RECORDINGS)
