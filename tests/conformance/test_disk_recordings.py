"""Tests of recordings with a disk behind host memory: every rule of this feature affects at least
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simkv.schedulers.vllm.disk_tier import DiskTier
from simkv.schedulers.vllm.host_block_store import HostBlockStore
from simkv.schedulers.vllm.offloading_connector import OffloadingConnector
from tests.conformance.recordings import of_kind

RECORDINGS = of_kind("vllm", "0.33.0", "disk")


def test_recordings_cover_reads_writes_and_lookups() -> None:
    traces = [recording.trace() for recording in RECORDINGS]
    assert len(traces) == 40
    for field in ("reads", "writes", "look", "loads", "flush", "preempted", "aborted"):
        assert sum(any(line.get(field) for line in trace.steps) for trace in traces) >= 15
    from_disk = [any(load[3] for line in t.steps for load in line["loads"]) for t in traces]
    assert sum(from_disk) >= 30
    knobs = {
        tuple(t.header["config"][k] for k in ("async_scheduling", "policy", "eviction_policy"))
        for t in traces
    }
    assert len(knobs) == 8
    assert sum(t.truncated is not None for t in traces) == 2


def _forgets(self: Any, asker: int) -> None:
    for key in self._asked.pop(asker, ()):
        self._verdicts.pop(key, None)


def _at_once(self: Any, looks: Any) -> None:
    for number in looks:
        for key in self.looks.pop(number):
            self._verdicts[key].answer = True


def _sees(self: Any, key: int, place: int, asker: int, uses: Any) -> str:
    """Make a request ask again in each step if it found nothing."""
    verdict = self._verdicts.get(key)
    if verdict and verdict.answer is False and key in self.files:
        verdict.answer = True
    return REAL_FIND(self, key, place, asker, uses)


REAL_FIND = DiskTier.find

MUTATIONS: list[tuple[str, type, str, Callable[..., Any]]] = [
    ("a hit is valid for one request", DiskTier, "forget", _forgets),
    ("lookups are kept forever", DiskTier, "forget", lambda s, asker: s.promoted.pop(asker, None)),
    ("every lookup is a hit", DiskTier, "looked", _at_once),
    ("a miss is not remembered", DiskTier, "find", _sees),
    ("no lookups", DiskTier, "find", lambda *_: "absent"),
    ("no writes to disk", DiskTier, "write", lambda s, owner, keys: None),
    ("blocks in transfer are evicted", HostBlockStore, "pin", lambda s, keys: None),
    ("finished requests are forgotten late", OffloadingConnector, "_forget", lambda s, share: None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "method", "rule"),
    [case[1:] for case in MUTATIONS],
    ids=[case[0] for case in MUTATIONS],
)
def test_a_changed_rule_changes_decisions(
    owner: type, method: str, rule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, rule)
    assert any(recording.differs() for recording in RECORDINGS)
