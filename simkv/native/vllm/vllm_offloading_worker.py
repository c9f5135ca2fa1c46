"""A worker for vLLM's offloading connector that copies no data.

The connector's scheduler side, its manager and its policies are the released vLLM code, unmodified.
vLLM passes ended requests and the blocks of a copy in sets, whose order is random. This module
orders requests by id, and blocks by their position in the prompt.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from simkv.core.recording_format import RecordingLine
from simkv.core.scheduler_protocol import KvCopies, KvCopy
from simkv.native.scripted_transfers import ScriptedCopies
from simkv.native.vllm.vllm_connector import connect, worker_report
from simkv.native.vllm.vllm_disk_tier import BLOCK_BYTES, SteppedDiskTier
from simkv.native.vllm.vllm_stubs import CONNECTOR_PACKAGE
from simkv.schedulers.vllm.config import VllmConfig


class FakeOffloadingWorker:
    """Worker that reports copies as finished; ``given`` is its configuration for vLLM."""

    def __init__(self, config: VllmConfig, copying: Mapping[str, Sequence[int]]) -> None:
        self.works = config.offloads
        self.disk = None
        if config.secondary_tiers:
            self.disk = SteppedDiskTier(copying.get("disk", ()), copying.get("looks", ()))
        self.given = _given(config, self.disk.given if self.disk else {}) if self.works else {}
        self._copies = ScriptedCopies(copying.get("copies", ()))
        self._loads: dict[int, str] = {}

    def attach(self, scheduler: Any) -> None:
        """Connect to the scheduler that owns the worker."""
        if self.disk:
            self.disk.attach(scheduler.connector.connector_scheduler.manager)

    def begin(self, connector: Any, output: Any, step: int) -> RecordingLine:
        """Start the copies of a batch and return the fields to record."""
        if not self.works:
            return {}
        meta = output.kv_connector_metadata
        loads = [
            KvCopy(n, int(job.req_id), len(_sides(job)[1].block_ids))
            for n, job in meta.load_jobs.items()
        ]
        stores = [
            KvCopy(n, int(job.req_id), len(_sides(job)[0].block_ids))
            for n, job in meta.store_jobs.items()
        ]
        side = connector.connector_scheduler
        jobs = side._jobs
        for number, *_ in (*loads, *stores):
            jobs[number].keys = sorted(jobs[number].keys)
        moves = KvCopies(loads, stores, sorted(meta.jobs_to_flush))
        self._loads.update((number, job.req_id) for number, job in meta.load_jobs.items())
        self._copies.begin(moves, step)
        line: RecordingLine = {
            "loads": [[*move[:3]] for move in loads],
            "stores": [[*move[:3]] for move in stores],
            "flush": moves.flush,
        }
        if self.disk:
            for load in line["loads"]:
                job = jobs[load[0]]
                load.append(self.disk.read_for(job.req_id, job.keys, side._req_status))
            line |= self.disk.begin(step)
        return line

    def report(self, step: int) -> Any:
        """Return the report on copies that have finished by ``step``."""
        return self.report_done(self._copies.done(step)) if self.works else None

    def report_done(self, done: Sequence[int]) -> Any:
        """Return the report on finished copies that vLLM receives with the result of a batch."""
        if not self.works:
            return None
        common = importlib.import_module(CONNECTOR_PACKAGE + ".offloading.common")
        meta = common.OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done, 1))
        arrived = sorted(self._loads.pop(number) for number in done if number in self._loads)
        return worker_report(arrived, (), kv_connector_worker_meta=meta)


def _sides(job: Any) -> Any:
    """Return the source and the destination of a copy; up to 0.24, one field contains both."""
    return getattr(job, "transfer_spec", None) or (job.src_spec, job.dst_spec)


def _given(config: VllmConfig, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the connector."""
    extra = {
        "cpu_bytes_to_use": config.num_cpu_blocks * BLOCK_BYTES,
        "eviction_policy": config.eviction_policy,
        **more,
    }
    return connect(config, _connector, is_kv_consumer=True, kv_connector_extra_config=extra)


def _connector() -> Any:
    """Return the connector's class, for blocks of ``BLOCK_BYTES`` bytes."""
    for name in (".offloading.config", ".offloading.scheduler"):
        module: Any = importlib.import_module(CONNECTOR_PACKAGE + name)
        module._group_kv_bytes_per_block = lambda _: BLOCK_BYTES
    return importlib.import_module(CONNECTOR_PACKAGE + ".offloading_connector").OffloadingConnector
