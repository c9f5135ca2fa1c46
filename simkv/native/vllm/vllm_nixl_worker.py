"""A worker for vLLM's released NIXL connector that transfers no data."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from simkv.core.recording_format import RecordingLine
from simkv.native.import_stubs import ConfigStub, ImportStub, name_of
from simkv.native.scripted_transfers import ScriptedTransfers
from simkv.native.vllm.vllm_connector import connect, worker_report
from simkv.native.vllm.vllm_stubs import CONNECTOR_PACKAGE
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


class Platform(ImportStub):
    """Stub of vLLM's platform, without devices."""

    get_nixl_supported_devices = dict


class NixlWorker:
    """Worker that reports transfers as finished; ``given`` is its configuration for vLLM."""

    works = False  # an attribute of workers that copy KV to host memory

    def __init__(self, config: VllmConfig, copying: Mapping[str, Sequence[int]]) -> None:
        self.given = _given(config)
        self._transfers = ScriptedTransfers(copying["transfers"])

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
        """Return the report on finished transfers that vLLM receives with the result of a batch."""
        loads, sends = self._transfers.done(step)
        return worker_report([name_of(i) for i in loads], [name_of(i) for i in sends])


def sampling_extra_args(request: Mapping[str, Any], block_size: int) -> Any:
    """Return the ``extra_args`` that a proxy sets for the KV transfer of a request, or None."""
    kv = request.get("kv")
    if kv is None:
        return None
    blocks = [*range(1, 1 + -(-request["prompt_tokens"] // block_size))]
    there = {"remote_block_ids": [blocks], "remote_request_id": f"p{request['id']}"}
    return {
        "kv_transfer_params": REMOTE_DECODE_PARAMS.copy()
        if kv == "send"
        else REMOTE_PREFILL_PARAMS | there
    }


def _blocks(ids: Any) -> int:
    """Return the number of blocks in one list or, since about 0.20, one list per layer group."""
    return sum(map(len, ids)) if ids and not isinstance(ids[0], int) else len(ids)


def _given(config: VllmConfig) -> dict[str, Any]:
    """Return the configuration of the connector."""

    def extra(_: str, default: Any) -> Any:
        return default

    return connect(
        config,
        _connector,
        kv_connector=config.kv_connector,
        kv_role=config.kv_role,
        is_kv_consumer=config.kv_role != "kv_producer",
        is_kv_producer=config.kv_role != "kv_consumer",
        kv_buffer_device="cuda",
        get_from_extra_config=extra,
    )


def _connector() -> Any:
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
