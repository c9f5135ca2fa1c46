"""Tests of LoRA adapters in vLLM: adapters that run, and adapters that are loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simkv.core.request import Prompt, Segment
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.lora import VllmLoras
from simkv.schedulers.vllm.request_state import FcfsQueue, RequestState
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.versions import find_rules


def step(loras: VllmLoras, *come: str | None, gone: tuple[str, ...] = ()) -> tuple[int, int]:
    """Run a step that admits requests with adapters ``come``; return the numbers of adapter
    loads.
    """
    for lora in gone:
        loras.leave(lora)
    loras.begin(())
    for lora in come:
        assert loras.admit(lora)
        loras.enter(lora)
    return loras.load()


def test_max_loras_does_not_count_base_model() -> None:
    loras = VllmLoras(2, 2)
    step(loras, "a", "b", None)
    assert [loras.admit(lora) for lora in ("a", "b", "c", None)] == [True, True, False, True]
    step(loras, gone=("a",))
    assert loras.admit("c")


def test_adapter_is_read_once_and_copied_again_after_eviction() -> None:
    loras = VllmLoras(1, 2)
    assert step(loras, "a") == (1, 1)
    assert step(loras, "a") == (0, 0)
    assert step(loras, "b", gone=("a", "a")) == (1, 1)
    assert step(loras, "a", gone=("b",)) == (1, 0)  # still in host memory
    assert step(loras, "c", gone=("a",)) == (1, 1)  # evicts b, the least recently used adapter
    assert step(loras, "b", gone=("c",)) == (1, 1)


def test_adapter_evicted_from_host_memory_leaves_gpu() -> None:
    loras = VllmLoras(2, 2)
    step(loras, "a", "b")
    assert step(loras, "c", gone=("a",)) == (1, 1)
    assert step(loras, "a", gone=("b",)) == (1, 1)


def prompts(*loras: str | None) -> list[Prompt]:
    return [Prompt(i, 8, 4, float(i), lora=lora) for i, lora in enumerate(loras)]


def waiting(variant: str, *loras: str | None) -> list[int]:
    """Return the ids of waiting requests after a step in which only one adapter may run."""
    config = VllmConfig(
        variant=variant, enable_lora=True, max_model_len=64, async_scheduling=False, max_num_seqs=8
    )
    scheduler = VllmScheduler(config)
    for prompt in prompts(*loras):
        scheduler.add(prompt)
    batch = scheduler.schedule()
    assert batch.aside == dict.fromkeys(scheduler.waiting_ids(), "adapter")
    assert batch.lora_loads == (1, 1)
    return scheduler.waiting_ids()


@pytest.mark.parametrize(
    ("variant", "order"), [("0.13.0", [3, 1]), ("0.14.0", [1, 3]), ("0.33.0", [1, 3])]
)
def test_skipped_requests_keep_their_order_since_0_14(variant: str, order: list[int]) -> None:
    assert waiting(variant, "a", "b", "a", "c", None) == order


def test_tokens_of_other_adapter_are_not_hit() -> None:
    config = VllmConfig(enable_lora=True, max_loras=2, max_model_len=64, async_scheduling=False)
    scheduler = VllmScheduler(config)
    shared = prompts("a", "b", "a")[0]
    for i, lora in enumerate(("a", "b", "a")):
        scheduler.add(
            replace(shared, id=i, prompt_tokens=33, segments=(Segment("g", 0, 33),), lora=lora)
        )
    assert scheduler.schedule().context == [0, 0, 32]


def test_skipped_requests_count_against_max_loras_since_0_33() -> None:
    assert find_rules("0.33").counts_all_loras
    assert not find_rules("0.32").counts_all_loras


def test_rejects_fewer_host_slots_than_gpu_slots() -> None:
    with pytest.raises(ValueError, match="max_cpu_loras: 1 must be at least max_loras 2"):
        VllmConfig(enable_lora=True, max_loras=2, max_cpu_loras=1)


def test_skipped_request_is_tried_first_from_0_18_to_0_30() -> None:
    queue = FcfsQueue(apart=True)
    first, second, third = (RequestState(prompt, 9, None) for prompt in prompts(None, "a", None))
    for r in (first, second, third):
        queue.add(r)
    queue.set_aside(second)
    queue.restore_aside()
    queue.put_back(first)
    assert [r.id for r in queue] == [1, 0, 2]
    assert queue.head() is second
    queue.remove(second)
    assert (len(queue), queue.head()) == (2, first)


def test_no_leap_while_order_reverses_in_each_step() -> None:
    config = VllmConfig(
        variant="0.13.0", max_num_seqs=4, max_model_len=64, async_scheduling=False, enable_lora=True
    )
    leaps = []
    for rest in (["b"], ["b", "b"]):
        scheduler = VllmScheduler(config)
        for i, lora in enumerate(("a", *rest)):
            scheduler.add(Prompt(i, 1, 30, 0.0, lora=lora))
        for _ in range(3):
            scheduler.complete(scheduler.schedule(), set())
        scheduler.schedule()
        leaps.append(scheduler.leap(10))
    assert leaps == [10, 1]
