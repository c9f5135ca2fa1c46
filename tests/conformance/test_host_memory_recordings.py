"""Tests of recordings with KV in host memory: every rule of this feature affects at least one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simkv.schedulers.vllm.host_eviction import ArcPolicy, LruPolicy
from simkv.schedulers.vllm.offload_scheduler import VllmOffloadScheduler
from simkv.schedulers.vllm.offloading_connector import OffloadingConnector
from simkv.schedulers.vllm.remote_kv_queue import RemoteKvQueue
from simkv.schedulers.vllm.versions import MINORS, find_rules
from tests.conformance.recordings import of_kind

RECORDINGS = of_kind("vllm", "0.33.0", "tier")


def test_recordings_cover_loads_stores_and_waits() -> None:
    traces = [recording.trace() for recording in RECORDINGS]
    assert len(traces) > 40
    for field in ("loads", "stores", "flush", "preempted", "aborted"):
        assert sum(any(line.get(field) for line in trace.steps) for trace in traces) >= 5
    knobs = {(t.header["config"]["async_scheduling"], t.header["config"]["policy"]) for t in traces}
    assert len(knobs) == 4
    assert {t.header["config"]["eviction_policy"] for t in traces} == {"lru", "arc"}


@pytest.mark.parametrize(
    "version", [name for name in MINORS.values() if "num_cpu_blocks" not in find_rules(name).fixed]
)
def test_every_release_with_host_memory_is_recorded(version: str) -> None:
    traces = [recording.trace() for recording in of_kind("vllm", version, "tier")]
    for field in ("loads", "stores", "flush", "preempted", "aborted"):
        assert any(any(line.get(field) for line in trace.steps) for trace in traces)


def _all_at_once(self: Any, r: Any, here: int) -> int | None:
    """Make a request wait neither for its own copies nor for blocks that other requests load."""
    share = self._shares[r.id]
    share.stored = 0
    if share.jobs:
        return None
    found, end = 0, r.length // self._size
    self._memory.name(r, r.length)
    while here + found < end and self.store.refs.get(r.keys[here + found], -1) >= 0:
        found += 1
    return found


def _rest_first(self: Any) -> Any:
    return (self._rest if len(self._rest) else self._holding).head()


# ruff: noqa: E501
MUTATIONS: list[tuple[str, type, str, Callable[..., Any]]] = [
    ("loads do not wait for each other", OffloadingConnector, "matched", _all_at_once),
    ("no waiting for a copy from a block", OffloadingConnector, "_fence", lambda s, job: None),
    ("prompts are stored at their end", OffloadingConnector, "owing", lambda s: []),
    ("requests with blocks come last", RemoteKvQueue, "head", _rest_first),
    ("loads reserve nothing", VllmOffloadScheduler, "_leaves_reserved", lambda s, hits, tokens: True),
    ("computed requests can be preempted", VllmOffloadScheduler, "_gives_way", lambda s, victim: True),
    ("uses do not count when a request ends", LruPolicy, "over", lambda s, keys, uses: None),
    ("uses do not count immediately", LruPolicy, "used", lambda s, keys, uses: None),
    ("ghost hits have no effect", ArcPolicy, "missed", lambda s, keys: None),
    ("a second use has no effect", ArcPolicy, "over", lambda s, keys, uses: None),
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
