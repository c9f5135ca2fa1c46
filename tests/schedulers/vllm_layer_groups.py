"""Helpers of the tests of vLLM's layer groups: a small engine, its steps and its hits."""

from __future__ import annotations

from typing import Any

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.scheduler import VllmScheduler

SMALL = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "async_scheduling": False}


def engine(**knobs: Any) -> VllmScheduler:
    return VllmScheduler(VllmConfig(**SMALL | knobs))


def step(scheduler: VllmScheduler, ended: tuple[int, ...] = ()) -> Batch:
    """Run one step and check that no block is lost."""
    batch = scheduler.schedule()
    scheduler.complete(batch, ended)
    scheduler.pool.check()
    return batch


def hits(scheduler: VllmScheduler, *prompts: Prompt) -> list[int]:
    """Serve the prompts one after the other; return the number of cached tokens of each."""
    found = []
    for prompt in prompts:
        scheduler.add(prompt)
        found.append(step(scheduler).context[0])
        while prompt.id in scheduler.running_ids():
            step(scheduler, (prompt.id,))
    return found
