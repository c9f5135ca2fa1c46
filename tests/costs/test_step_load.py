"""Tests of the amount of work in a step, and of the spread of its decode contexts."""

from __future__ import annotations

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch
from simkv.costs.simulated_executor import advance_load
from simkv.costs.step_load import StepLoad, compute_step_load
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.spec import build


def test_load_of_a_mixed_batch() -> None:
    batch = Batch(
        scheduled=[(1, 1), (2, 1), (3, 20)],
        context=[50, 80, 0],
        emits=[1, 2, 3],
        kind="mixed",
    )
    expected = StepLoad(1, 20, 0, 2, 130, 210, 3)
    assert compute_step_load(batch) == expected
    assert compute_step_load(batch, spread=True) == expected._replace(shortest=50, longest=80)


def test_spread_of_a_decode_group_grows_by_one_token_per_step() -> None:
    scheduler = build(VllmConfig(async_scheduling=False, max_model_len=4096))
    for number, prompt in enumerate((30, 90, 60)):
        scheduler.add(Prompt(number, prompt, 50))
    scheduler.complete(scheduler.schedule(), ())
    first = scheduler.schedule()
    load = compute_step_load(first, spread=True)
    assert (load.decode_seqs, load.shortest, load.longest, load.emits) == (3, 30, 90, 3)
    scheduler.complete(first, ())
    assert compute_step_load(scheduler.schedule(), spread=True) == advance_load(load, 1)
    assert advance_load(compute_step_load(first), 2).longest == 0
