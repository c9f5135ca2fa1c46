"""Workers for vLLM's KV connectors that copy and transfer no data.

The connectors are the released vLLM code. vLLM passes ended requests and the blocks of a copy in
sets, whose order is random; here, requests are ordered by id, and blocks by position.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from simkv.core.recording_format import RecordingLine
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import KvCopies, KvCopy
from simkv.native.import_stubs import ConfigStub, ImportStub, name_of
from simkv.native.scripted_transfers import ScriptedCopies, ScriptedTransfers
from simkv.native.vllm.vllm_disk_tier import BLOCK_BYTES, SteppedDiskTier
from simkv.native.vllm.vllm_stubs import CONNECTOR_PACKAGE, CORE
from simkv.schedulers.vllm.config import VllmConfig

#: Location of a prompt's KV, in the format that a prefill replica uses to report it.
REMOTE_PREFILL_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "1",
    "remote_host": "there",
    "remote_port": 5600,
    "tp_size": 1,
}
REMOTE_DECODE_PARAMS = {"do_remote_prefill": False, "do_remote_decode": True}


#: Modules of the connector in all releases; each release has only some of these modules.
CONNECTOR_MODULES = (
    ".nixl.connector",
    ".nixl.base_scheduler",
    ".nixl.scheduler",
    ".nixl_connector",
)


def connect(config: VllmConfig, load: Callable[[], Any], **given: Any) -> dict[str, Any]:
    """Make vLLM create the connector of ``load``, and return the fields of its configuration."""
    base = importlib.import_module(CONNECTOR_PACKAGE + ".base")
    names = ("KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA")
    real = {name: getattr(base, name) for name in names if hasattr(base, name)}
    importlib.import_module(CONNECTOR_PACKAGE).__dict__.update(real)
    kind = load()

    def create(config: Any, role: Any = None, kv_cache_config: Any = None) -> Any:  # noqa: ARG001
        last = () if kv_cache_config is None else (kv_cache_config,)
        return kind(config, base.KVConnectorRole.SCHEDULER, *last)

    # An earlier case may have imported the scheduler when these modules were stubs.
    scheduler = importlib.import_module(CORE + "sched.scheduler")
    scheduler.__dict__.update(real, KVConnectorFactory=ConfigStub(create_connector=create))
    return {
        "kv_transfer_config": ConfigStub(
            engine_id="0", kv_load_failure_policy="recompute", **given
        ),
        "max_concurrent_batches": config.depth,
        "use_v2_model_runner": True,
    }


def worker_report(loaded: Sequence[str], sent: Sequence[str], **more: Any) -> Any:
    """Return the report on transfers that vLLM receives with the result of a batch."""
    return ConfigStub(
        finished_recving=loaded,
        finished_sending=sent,
        failed_recving=(),
        invalid_block_ids=(),
        **more,
    )


class Platform(ImportStub):
    """Stub of vLLM's platform, without devices."""

    get_nixl_supported_devices = dict


class NixlWorker:
    """Worker that reports transfers as finished; ``given`` is its configuration for vLLM."""

    # attributes of workers that copy KV to host memory
    works = False
    pending_writes = 0

    def __init__(self, config: VllmConfig, copying: Mapping[str, Sequence[int]]) -> None:
        self.given = connect(
            config,
            _nixl_connector,
            kv_connector=config.kv_connector,
            kv_role=config.kv_role,
            is_kv_consumer=config.kv_role != "kv_producer",
            is_kv_producer=config.kv_role != "kv_consumer",
            kv_buffer_device="cuda",
            get_from_extra_config=lambda _, default: default,
        )
        self._transfers = ScriptedTransfers(copying.get("transfers", ()))

    def attach(self, _: Any) -> None:
        """Do nothing, because this worker does not need the scheduler."""

    def begin(self, _: Any, output: Any, step: int) -> RecordingLine:
        """Start the loads of a batch and the sends of ended requests; return the line's fields."""
        meta = output.kv_connector_metadata
        loads = [(int(i), _blocks(m.local_block_ids)) for i, m in meta.reqs_to_recv.items()]
        sends = sorted(map(int, meta.reqs_to_send))
        self._transfers.begin(loads, sends, step)
        return {"loads": [[*load] for load in loads], "sends": sends}

    def report(self, step: int) -> Any:
        """Return the report on finished transfers. vLLM receives it with the result of a batch."""
        loads, sends = self._transfers.done(step)
        return worker_report([name_of(i) for i in loads], [name_of(i) for i in sends])

    def report_done(self, _: Sequence[int]) -> None:
        """Return None, because ``NativeVllm`` reports transfers as soon as they finish."""


def sampling_extra_args(prompt: Prompt, transfer: str | None, block_size: int) -> Any:
    """Return the ``extra_args`` that a proxy sets for the KV transfer of a request, or None."""
    if transfer is None:
        return None
    blocks = [*range(1, 1 + -(-prompt.prompt_tokens // block_size))]
    there = {"remote_block_ids": [blocks], "remote_request_id": f"p{prompt.id}"}
    sends = transfer == "send"
    return {
        "kv_transfer_params": REMOTE_DECODE_PARAMS.copy()
        if sends
        else REMOTE_PREFILL_PARAMS | there
    }


def _blocks(ids: Any) -> int:
    """Return the number of blocks in one list or, since about 0.20, one list per layer group."""
    return sum(map(len, ids)) if ids and not isinstance(ids[0], int) else len(ids)


def _nixl_connector() -> Any:
    """Return the connector's class in this release."""
    importlib.import_module("vllm.platforms").__dict__["current_platform"] = Platform
    here = [
        m for m in CONNECTOR_MODULES if (spec := find_spec(CONNECTOR_PACKAGE + m)) and spec.origin
    ]
    modules = [importlib.import_module(CONNECTOR_PACKAGE + m) for m in here]
    for module in modules:
        module.__dict__["envs"] = ConfigStub(
            VLLM_NIXL_SIDE_CHANNEL_HOST="here",
            VLLM_NIXL_SIDE_CHANNEL_PORT=5600,
            VLLM_NIXL_ABORT_REQUEST_TIMEOUT=480,
        )
    return next(m.NixlConnector for m in modules if "NixlConnector" in vars(m))


class FakeOffloadingWorker:
    """Worker that reports copies as finished; ``given`` is its configuration for vLLM."""

    def __init__(self, config: VllmConfig, copying: Mapping[str, Sequence[int]]) -> None:
        self.works = config.offloads
        self.disk = None
        if config.secondary_tiers:
            self.disk = SteppedDiskTier(copying.get("disk"), copying.get("looks", ()))
        self.given: dict[str, Any] = {}
        if self.works:
            extra = {
                "cpu_bytes_to_use": config.num_cpu_blocks * BLOCK_BYTES,
                "eviction_policy": config.eviction_policy,
                **(self.disk.given if self.disk else {}),
            }
            self.given = connect(
                config, _offloading_connector, is_kv_consumer=True, kv_connector_extra_config=extra
            )
        self._copies = ScriptedCopies(copying.get("copies", ()))
        self._loads: dict[int, str] = {}

    def attach(self, scheduler: Any) -> None:
        """Connect to the scheduler that owns the worker."""
        if self.disk:
            self.disk.attach(scheduler.connector.connector_scheduler.manager)

    @property
    def pending_writes(self) -> int:
        """Number of writes to disk that no batch lists yet."""
        return self.disk.pending_writes if self.disk else 0

    def begin(self, connector: Any, output: Any, step: int) -> RecordingLine:
        """Start the copies of a batch and return the fields to record."""
        if not self.works:
            return {}
        meta = output.kv_connector_metadata
        loads, stores = (
            [KvCopy(n, int(job.req_id), len(_sides(job)[k].block_ids)) for n, job in jobs.items()]
            for k, jobs in ((1, meta.load_jobs), (0, meta.store_jobs))
        )
        side = connector.connector_scheduler
        for number, *_ in (*loads, *stores):
            side._jobs[number].keys = sorted(side._jobs[number].keys)
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
                job = side._jobs[load[0]]
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


def _offloading_connector() -> Any:
    """Return the connector's class, for blocks of ``BLOCK_BYTES`` bytes."""
    for name in (".offloading.config", ".offloading.scheduler"):
        module: Any = importlib.import_module(CONNECTOR_PACKAGE + name)
        module._group_kv_bytes_per_block = lambda _: BLOCK_BYTES
    return importlib.import_module(CONNECTOR_PACKAGE + ".offloading_connector").OffloadingConnector
