"""vLLM's KV connectors, whose scheduler side is the released code, with fake workers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from simkv.native.import_stubs import ConfigStub
from simkv.native.vllm.vllm_stubs import CONNECTOR_PACKAGE, CORE
from simkv.schedulers.vllm.config import VllmConfig


def connect(config: VllmConfig, load: Callable[[], Any], **given: Any) -> dict[str, Any]:
    """Make vLLM's scheduler create the connector whose class ``load`` returns.

    Returns the fields of vLLM's configuration; ``given`` are fields of its ``kv_transfer_config``.
    """
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
