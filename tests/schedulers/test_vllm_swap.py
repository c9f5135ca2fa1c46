"""vLLM's rules with swapping: the preempted keep their KV as far as the host has room."""

from __future__ import annotations

from typing import Any

import pytest

from simkv.core.request import Prompt
from simkv.core.scheduler import Batch, Row, Swap
from simkv.costs.load import load_of
from simkv.costs.profile import load_profile
from simkv.measure.metrics import summary
from simkv.proof.validation.served.levels import simulate
from simkv.scenario.scenario import Scenario
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.spec import build


def scheduler(num_cpu_blocks: int, *, tables: bool = True, **knobs: Any) -> Any:
    """Four usable blocks of four tokens."""
    config = VllmConfig(
        variant="0.33.0-swap",
        block_size=4,
        num_gpu_blocks=5,
        max_model_len=16,
        max_num_seqs=4,
        enable_prefix_caching=False,
        async_scheduling=False,
        num_cpu_blocks=num_cpu_blocks,
        **knobs,
    )
    return build(config, tables=tables)


def step(s: Any, ended: tuple[int, ...] = ()) -> Batch:
    batch: Batch = s.schedule()
    s.complete(batch, ended)
    return batch


def until_preempted(s: Any) -> Batch:
    """Two requests of six tokens: with nine each they need six of four blocks."""
    for i in (0, 1):
        s.add(Prompt(i, 6, 10))
    for _ in range(10):
        batch = step(s)
        if batch.preempted:
            return batch
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize("tables", [True, False])
def test_a_victim_goes_out_whole_and_comes_back_where_it_was(tables: bool) -> None:
    s = scheduler(10, tables=tables)
    batch = until_preempted(s)
    assert batch.preempted == [1]
    (out,) = batch.swapped_out
    assert (out.id, out.blocks, len(out.table)) == (1, 2, 2 if tables else 0)
    assert load_of(batch).swap_out_blocks == 2
    assert not batch.swapped_in
    while 0 in s.running_ids():
        step(s, (0,))
    batch = s.schedule()
    assert batch.swapped_in == [Swap(1, 2, tuple(s.pool.tables[1][:2]) if tables else ())]
    assert load_of(batch).swap_in_blocks == 2
    # Eight tokens had KV when it was preempted; the ninth, known since, is computed next.
    assert batch.rows() == [Row(1, 1, 8)]


def test_a_host_without_room_means_recompute() -> None:
    s = scheduler(1)
    batch = until_preempted(s)
    assert (batch.preempted, batch.swapped_out) == ([1], [])
    step(s, (0,))
    batch = s.schedule()
    assert batch.swapped_in == []
    assert batch.rows() == [Row(1, 9, 0)]


def test_a_client_that_leaves_gives_its_host_blocks_back() -> None:
    s = scheduler(2)
    until_preempted(s)
    assert s._host_free == 0
    s.abort(1)
    assert s._host_free == 2


def test_every_block_that_goes_out_comes_back_or_is_freed() -> None:
    arrivals = {"num_prompts": 40, "request_rate": 1e6, "prompt_tokens": 12, "output_tokens": 20}
    engine = {"name": "vllm", "block_size": 4, "num_gpu_blocks": 30, "max_model_len": 64}
    engine |= {"enable_prefix_caching": False, "max_num_seqs": 12}
    found = {}
    for name, knobs in {
        "recompute": {},
        "swap": {"variant": "0.33.0-swap", "num_cpu_blocks": 100},
        "no room": {"variant": "0.33.0-swap", "num_cpu_blocks": 0},
    }.items():
        scenario = Scenario.model_validate(
            {
                "name": "s",
                "workload": {"arrivals": arrivals},
                "engine": {**engine, **knobs},
                "profile": "unit-step",
            }
        )
        found[name] = summary(simulate(scenario, load_profile("unit-step")))
    assert found["no room"] == found["recompute"]
    assert found["swap"]["preemptions"] > 10
    assert found["swap"]["recomputed_tokens"] < 0.2 * found["recompute"]["recomputed_tokens"]
    assert found["swap"]["finished"] == 40


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"variant": "0.33.0-swap", "eviction_policy": "arc"}, "not modelled with offloading"),
        ({"variant": "0.33.0-swap", "enable_prefix_caching": True}, "no prefix cache"),
    ],
)
def test_knobs_that_do_not_go_together(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VllmConfig(**knobs)


def test_without_a_word_about_it_there_is_no_prefix_cache() -> None:
    scheduler = build(VllmConfig(variant="0.33.0-swap"))
    assert scheduler.cache is None
