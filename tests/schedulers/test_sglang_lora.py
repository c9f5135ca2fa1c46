"""LoRA adapters in SGLang: adapters per batch, draining and loading."""

from __future__ import annotations

import pytest

from simkv.core.block_keys import TokenContent
from simkv.core.request import Prompt
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.lora import LoraDrainer, SglangLoras
from simkv.schedulers.sglang.memory import Req
from simkv.schedulers.sglang.scheduler import SglangScheduler


def req(i: int, lora: str | None, most: int = 10, queued_at: float = 0.0) -> Req:
    return Req(i, 4, most, False, TokenContent(Prompt(i, 4, most)), lora, queued_at)


def test_base_model_counts_as_adapter() -> None:
    loras = SglangLoras(2, 0.0)
    loras.begin([], [req(0, "a"), req(1, None)], [], 0.0)
    assert [loras.admit(req(2, lora)) for lora in ("a", None, "b")] == [True, True, False]


def test_adapter_of_candidate_counts_for_rest_of_pass() -> None:
    loras = SglangLoras(1, 0.0)
    loras.begin([], [], [], 0.0)
    assert loras.admit(req(0, "a"))
    loras.note_candidate(req(0, "a"))
    assert not loras.admit(req(1, "b"))


def test_evicts_least_recently_used_adapter_and_base_model_last() -> None:
    loras = SglangLoras(2, 0.0)
    assert loras.load([req(0, None)]) == 0  # nothing to copy
    assert loras.load([req(1, "a")]) == 1
    assert loras.load([req(2, "b")]) == 1  # evicts a
    assert loras.load([req(3, None)]) == 0
    assert loras.load([req(4, "a"), req(5, "c")]) == 2


def test_adapter_that_finishes_first_drains_for_waiting_adapter() -> None:
    drainer = LoraDrainer(2, 5.0)
    running = [req(0, "a", most=40), req(1, "b", most=20)]
    drainer.update([req(2, "c", queued_at=0.0)], running, 5.0)
    assert drainer.draining == {}
    drainer.update([req(2, "c", queued_at=0.0)], running, 5.1)
    assert drainer.draining == {"b": "c"}
    assert drainer.admits(req(3, "b", most=24))
    assert not drainer.admits(req(3, "b", most=25))
    assert drainer.admits(req(3, "a", most=1000))
    drainer.update([req(2, "c", queued_at=0.0)], running[:1], 6.0)
    assert drainer.draining == {}  # b has finished


def test_of_equal_waits_the_request_queued_first_is_served_first() -> None:
    drainer = LoraDrainer(2, 5.0)
    running = [req(0, "a", most=40), req(1, "b", most=20)]
    waiting = [req(2, "d"), req(3, "c")]
    for entry, r in enumerate(reversed(waiting)):
        r.entry = entry
    drainer.update(waiting, running, 6.0)
    assert drainer.draining == {"b": "c", "a": "d"}


@pytest.mark.parametrize(("threshold", "first"), [(0.0, [0, 2, 3]), (2.5, [0, 2, 1])])
def test_draining_adapter_lets_waiting_adapter_run(threshold: float, first: list[int]) -> None:
    """Requests use A, B, A and later A; with the threshold, B waits too long and A drains."""
    config = SglangConfig(
        enable_lora=True,
        max_loras_per_batch=1,
        lora_drain_wait_threshold=threshold,
        disable_overlap_schedule=True,
    )
    scheduler = SglangScheduler(config)
    come = {0: [(0, "A"), (1, "B"), (2, "A")], 4: [(3, "A")]}
    served: list[int] = []
    left = {0: 3, 1: 3, 2: 6, 3: 3}
    for now in range(12):
        scheduler.set_time(float(now))
        for i, lora in come.get(now, ()):
            scheduler.add(Prompt(i, 8, left[i], float(now), lora=lora))
        batch = scheduler.schedule()
        served += [i for i in batch.emits if i not in served]
        for i in batch.emits:
            left[i] -= 1
        scheduler.complete(batch, {i for i in batch.emits if left[i] == 0})
    assert served[:3] == first
