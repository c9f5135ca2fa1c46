"""Tests of vLLM's schedulers that load KV, if a step in flight still writes to blocks of the
request.
"""

from __future__ import annotations

from simkv.core.request import Prompt
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.transfer_scheduler import VllmTransferScheduler


def test_blocks_of_aborted_request_are_freed_after_step_in_flight() -> None:
    config = VllmConfig(
        block_size=4, num_gpu_blocks=33, max_model_len=64, max_num_seqs=4,
        kv_connector="NixlConnector", kv_role="kv_consumer", async_scheduling=True,
    )  # fmt: skip
    scheduler = VllmTransferScheduler(config)
    for i in range(2):
        scheduler.add(Prompt(i, 8, 40))
    flights = [scheduler.schedule(), scheduler.schedule()]
    for _ in range(2):
        scheduler.complete(flights.pop(0), ())
        flights.append(scheduler.schedule())
    assert scheduler.leap(5) == 5
    free = scheduler.free_blocks
    scheduler.abort(1)
    leaps = []
    while scheduler.free_blocks <= free:
        leaps.append(scheduler.leap(5))
        scheduler.complete(flights.pop(0), ())
        flights.append(scheduler.schedule())
    assert leaps == [1, 1]  # the two steps in flight end one after another
    assert scheduler.leap(5) == 5
    assert scheduler.free_blocks == 32 - scheduler.blocks_held()[0]
