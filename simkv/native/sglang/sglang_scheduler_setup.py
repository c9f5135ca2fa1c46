"""Set up a released SGLang scheduler, without its constructor, with its own components."""

from __future__ import annotations

import importlib
import inspect
import math
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from simkv.native.import_stubs import ConfigStub, ImportStub, Stub, accepted_fields
from simkv.native.sglang.sglang_stubs import PARALLEL_SETTINGS, SETTINGS
from simkv.schedulers.sglang.config import SglangConfig


class OrderedPreemption:
    """Mixin that preempts requests by id; SGLang iterates over a set, whose order is random."""

    def preempt_to_schedule(self: Any, *given: Any) -> bool:
        before = len(self.preempt_list)
        done = bool(super().preempt_to_schedule(*given))  # type: ignore[misc]
        self.preempt_list[before:] = sorted(self.preempt_list[before:], key=lambda r: r.rid)
        return done


class SglangReleaseMemory:
    """SGLang's own request table, token pool and prefix cache, with the sizes of a case."""

    def __init__(self, config: SglangConfig) -> None:
        import torch

        pools = "sglang.srt.mem_cache."
        size, page = config.max_total_num_tokens, config.page_size
        rest = (torch.float16, "cpu", ImportStub(), False)
        if page == 1:
            tokens = importlib.import_module(pools + "allocator.token")
            self.allocator = tokens.TokenToKVPoolAllocator(size, *rest)
        else:
            paged = importlib.import_module(pools + "allocator.paged")
            self.allocator = paged.PagedTokenToKVPoolAllocator(size, page, *rest)
            self.allocator.use_triton_kernels = False
        rows = importlib.import_module(pools + "memory_pool").ReqToTokenPool
        with patch.object(torch, "zeros", _lazy_zeros):
            self.rows = rows(config.rows, size + 64, "cpu", False)
        params = importlib.import_module(pools + "cache_init_params").CacheInitParams
        given = {
            "disable": config.disable_radix_cache,
            "req_to_token_pool": self.rows,
            "token_to_kv_pool_allocator": self.allocator,
            "page_size": page,
            **accepted_fields(params, tree_core_backend="python", eviction_policy="lru"),
        }
        chunks = _real(pools + "chunk_cache", "ChunkCache")
        if not _real("sglang.srt.mem_cache.unified_cache.components", "ComponentType"):
            radix = importlib.import_module(pools + "radix_cache").RadixCache
            kind = chunks if config.disable_radix_cache and config.chunk > 0 else radix
        else:
            parts = importlib.import_module(pools + "unified_cache.components").ComponentType
            given["tree_components"] = (parts.FULL,)
            unified = importlib.import_module(pools + "unified_radix_cache").UnifiedRadixCache
            kind = chunks if chunks and config.disable_radix_cache else unified
        self.tree = kind(params(**given))


def _lazy_zeros(shape: Any, dtype: Any, **_: object) -> Any:
    """Return a CPU tensor of zeros; the operating system provides its memory when it is written.

    A table with a row for each of 4,096 requests can have several GB, most of which is never used.
    """
    import torch

    size = math.prod(shape) if isinstance(shape, tuple) else int(shape)
    bytes_ = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(bytes_, dtype=dtype).view(shape)


def build_sglang_scheduler(
    config: SglangConfig,
    memory: SglangReleaseMemory,
    clock: Callable[[], float],
    retracted: Callable[[Any], None],
    gave_up: Callable[[Any, Any], None],
) -> Any:
    """Return the scheduler, which reports preemptions (``retracted``) and aborts (``gave_up``)."""
    _set(config)
    module: Any = importlib.import_module("sglang.srt.managers.scheduler")
    policies: Any = importlib.import_module("sglang.srt.managers.schedule_policy")
    policies.CLIP_MAX_NEW_TOKENS = config.clip_max_new_tokens_estimation
    for name in ("check", "deprioritize"):
        limit = getattr(config, f"in_batch_prefix_caching_{name}_threshold")
        setattr(policies, f"IN_BATCH_PREFIX_CACHING_{name.upper()}_THRESHOLD", limit)

    module.PrefillAdder = type("Adder", (OrderedPreemption, policies.PrefillAdder), {})
    scheduler = _bare(module, retracted, gave_up)
    for name, value in _parts(config, memory, clock, gave_up).items():
        setattr(scheduler, name, value)
    _set_up_delayer(clock)
    for part in ("running_status", "chunked_prefill", "schedule_policy"):
        getattr(module.Scheduler, f"init_{part}")(scheduler)
    scheduler.result_queue = deque()
    # The overlap loop sets this attribute at its start.
    scheduler.enable_skip_finishing_decode = not config.disable_overlap_schedule
    components = "sglang.srt.managers.scheduler_components."
    for part, name in (
        ("pool_stats_observer", "SchedulerPoolStatsObserver"),
        ("batch_result_processor", "SchedulerBatchResultProcessor"),
    ):
        kind = getattr(importlib.import_module(components + part), name)
        given = {field: getattr(scheduler, field) for field in kind.__dataclass_fields__}
        setattr(scheduler, part, kind(**given))
    return scheduler


def _bare(
    module: Any, retracted: Callable[[Any], None], gave_up: Callable[[Any, Any], None]
) -> Any:
    """Return a scheduler object without attributes."""

    class Bare(module.Scheduler, Stub):  # type: ignore[misc]
        """SGLang's scheduler class; unset attributes are None."""

        def __init__(self) -> None: ...

        def _missing(self, _: str) -> None: ...

        def _add_request_to_queue(self, request: Any, is_retracted: bool = False) -> None:
            if is_retracted or request.is_retracted:
                retracted(request)
            super()._add_request_to_queue(request, is_retracted)

        def send_abort_output(self, output: Any, request: Any) -> None:
            gave_up(output, request)

    return Bare()


def recv_skipper() -> Callable[[Any], bool] | None:
    """Return SGLang's check for receiving requests after a batch; None if it always receives."""
    managers, name = "sglang.srt.managers.", "SchedulerRecvSkipper"
    kind: Any = _real(managers + "scheduler_components.recv_skipper", name)
    kind = kind or _real(managers + "scheduler_recv_skipper", name)  # module in 0.5.15
    skipper = kind.maybe_create(**accepted_fields(kind.maybe_create, server_args=SETTINGS))
    if skipper and "last_forward_mode" in inspect.signature(skipper.handle).parameters:
        return lambda last: bool(skipper.handle(last and last.forward_mode))  # name up to 0.5.15
    receives: Callable[[Any], bool] | None = skipper and skipper.handle
    return receives


def _set_up_delayer(clock: Callable[[], float]) -> None:
    """Patch SGLang's prefill delayer to use this clock and a single rank."""
    import torch

    def gather(out: Any, told: Any, **_: Any) -> None:
        out.copy_(told)

    module: Any = importlib.import_module("sglang.srt.managers.prefill_delayer")
    module.time = ConfigStub(perf_counter=clock)
    # otherwise the patch for an earlier case would remain
    if isinstance(kind := module._State, type):
        module.first_state = kind
    module._State = lambda: module.first_state(start_time=clock())
    module.all_gather_single = gather
    older = ConfigStub(all_gather_into_tensor=gather)
    module.torch = ConfigStub(
        tensor=torch.tensor, empty=torch.empty, int64=torch.int64, distributed=older
    )


def _free_slots(config: SglangConfig) -> Any:
    """Return SGLang's object that delays prefills until enough rows are free; None if it is off."""
    module = importlib.import_module("sglang.srt.managers.min_free_slots_delayer")
    least = module.resolve_min_free_slots(config.min_free_slots_delay, config.rows)
    return least and module.MinFreeSlotsDelayer(least)


def _drainer(config: SglangConfig, clock: Callable[[], float]) -> Any:
    """Return SGLang's drainer of LoRA adapters; None if it is off."""
    if not config.lora_drain_wait_threshold:
        return None
    module: Any = importlib.import_module("sglang.srt.lora.lora_drainer")
    module.time = ConfigStub(monotonic=clock)
    # SGLang selects from a set, in which the position of None differs from process to process.
    module.min = lambda names, key: min(sorted(names, key=lambda name: name or ""), key=key)
    return module.LoRADrainer(config.max_loras_per_batch, config.lora_drain_wait_threshold)


def _parts(
    config: SglangConfig,
    memory: SglangReleaseMemory,
    clock: Callable[[], float],
    gave_up: Callable[[Any, Any], None],
) -> dict[str, Any]:
    """Return the attributes of the scheduler; some of them do not affect its decisions."""
    modes: Any = importlib.import_module("sglang.srt.disaggregation.utils")
    return {
        **{knob.name: getattr(config, knob.name) for knob in fields(config)},
        "server_args": SETTINGS,
        "ps": PARALLEL_SETTINGS,
        "tree_cache": memory.tree,
        "req_to_token_pool": memory.rows,
        "token_to_kv_pool_allocator": memory.allocator,
        "max_req_len": config.max_total_num_tokens - 1,
        "max_running_requests": config.rows,
        "enable_overlap": not config.disable_overlap_schedule,
        "kv_shard_widening": 1,
        "processed_tokens_counter": 0,
        "max_prefill_bs": 0,
        "entries": 0,
        "clock": clock,
        "min_free_slots_delayer": _free_slots(config),
        "lora_drainer": _drainer(config, clock),
        "is_generation": True,
        "disaggregation_mode": modes.DisaggregationMode.NULL,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "model_config": ConfigStub(is_encoder_decoder=False, vocab_size=1 << 40),
        "beam_coordinator": ConfigStub(
            pending_member_rows=lambda _: 0,
            commit_decode=lambda _: set(),
            retire_group=lambda _: None,
        ),
        "dp_attn_adapter": ConfigStub(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        ),
        "ngram_embedding_manager": ConfigStub(prepare_for_forward=lambda batch, **_: batch),
        "grammar_manager": ConfigStub(
            has_waiting_grammars=lambda: False, abort_requests=lambda _: None
        ),
        "load_inquirer": ConfigStub(_get_num_pending_tokens=lambda **_: 0),
        "tp_worker": ConfigStub(
            model_runner=ConfigStub(
                lora_manager=ConfigStub(
                    validate_lora_batch=lambda ids: len(ids) <= config.max_loras_per_batch
                ),
            )
        ),
        "output_streamer": ImportStub(),
        "tp_group": ConfigStub(),
        "max_req_input_len": config.max_total_num_tokens - 6,
        "ipc_channels": ConfigStub(send_to_tokenizer=ConfigStub(send_output=gave_up)),
        "metrics_reporter": ConfigStub(
            num_retracted_reqs=0,
            num_generated_tokens=0,
            forward_ct_decode=0,
            report_decode_stats=lambda *_, **__: None,
            report_prefill_stats=lambda *_, **__: None,
        ),
    }


def _set(config: SglangConfig) -> None:
    """Set all settings of the config where SGLang reads them, as its launcher does."""
    for knob in fields(config):
        setattr(SETTINGS, knob.name, getattr(config, knob.name))
    for place in (PARALLEL_SETTINGS, SETTINGS):
        place.pp_max_micro_batch_size = config.rows
    for name, value in {
        "INIT_NEW_TOKEN_RATIO": config.init_new_token_ratio,
        "MIN_NEW_TOKEN_RATIO_FACTOR": config.min_new_token_ratio_factor,
        "NEW_TOKEN_RATIO_DECAY_STEPS": config.new_token_ratio_decay_steps,
        "RETRACT_DECODE_STEPS": config.retract_decode_steps,
        "CLIP_MAX_NEW_TOKENS_ESTIMATION": config.clip_max_new_tokens_estimation,
    }.items():
        os.environ[f"SGLANG_{name}"] = str(value)


def _real(module: str, name: str) -> Any:
    """Return the class with this name in SGLang's code, or None if the release lacks it."""
    found = getattr(importlib.import_module(module), name, None)
    return found if isinstance(found, type) and not issubclass(found, ImportStub) else None
