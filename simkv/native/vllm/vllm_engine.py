"""Drive the unmodified scheduler of a vLLM release or checkout with a fake model."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from math import gcd, lcm
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from simkv.core.request import Prompt, Segment
from simkv.native.import_stubs import (
    ConfigStub,
    ImportStub,
    OneRank,
    accepted_fields,
    name_of,
    numbering,
)
from simkv.native.vllm.vllm_disk_tier import BLOCK_BYTES
from simkv.native.vllm.vllm_kv_workers import FakeOffloadingWorker, NixlWorker, sampling_extra_args
from simkv.native.vllm.vllm_stubs import CORE, speculation_fields
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.layer_group_parser import LayerKind
from simkv.schedulers.vllm.versions import find_rules


class Tokens(list[int]):
    """Sampled tokens of a request, with the method ``tolist`` that 0.11.1 and 0.11.2 expect."""

    def tolist(self) -> list[int]:
        """Return the tokens as a plain list."""
        return [*self]


class Launched(NamedTuple):
    """A scheduling decision: vLLM's ``output``, and the work of the step.

    ``rows`` has the numbers of scheduled tokens by request id, and ``start`` those of tokens before
    them. ``emits`` are the requests that emit a token, and ``drafts`` those that may be accepted.
    """

    output: Any
    rows: dict[str, int]
    start: dict[str, int]
    emits: list[str]
    kind: str
    verified: dict[str, int]
    drafts: dict[str, int]


class VllmEngine:
    """vLLM's scheduler with the given settings, and the requests added to it.

    ``instead`` maps the scheduler's class to the class to run. ``copying`` are durations of KV
    copies in steps. ``native`` are further options of vLLM, by config class. ``freed`` lists the
    requests whose blocks the last decision freed.
    """

    def __init__(
        self,
        config: VllmConfig,
        instead: Callable[[type], type] = lambda kind: kind,
        copying: Mapping[str, Sequence[int]] = MappingProxyType({}),
        native: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.config, self.instead, self.native = config, instead, native
        worker = NixlWorker if config.kv_connector else FakeOffloadingWorker
        self.worker: Any = worker(config, copying)
        self.number = numbering()
        self.loras: dict[str, int] = {}
        self.stops: dict[str, list[int]] = {}
        self.speculation = speculation_fields(config)
        self.scheduler = self._scheduler()
        self.worker.attach(self.scheduler)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.drafted: set[str] = set()  # requests with draft tokens that the model may accept
        self.freed: list[int] = []
        self._status = importlib.import_module("vllm.v1.request").RequestStatus
        manager = self.scheduler.kv_cache_manager
        manager.free = self._noting(manager.free)
        # these blocks are freed after the steps in flight
        if hasattr(manager, "pop_blocks_for_free"):
            manager.pop_blocks_for_free = self._noting(manager.pop_blocks_for_free)

    def _noting(self, free: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``free`` to record the requests whose blocks it frees."""

        def noting(request: Any) -> Any:
            self.freed.append(int(request.request_id))
            return free(request)

        return noting

    def abort(self, number: int) -> None:
        """Abort a request, as vLLM does if its client disconnects."""
        self.scheduler.finish_requests(name_of(number), self._status.FINISHED_ABORTED)

    def launch(self) -> Launched:
        """Make a scheduling decision."""
        scheduler = self.scheduler
        lengths = {i: r.num_tokens for i, r in scheduler.requests.items()}
        self.freed.clear()
        if self.worker.works:
            scheduler.finished_req_ids = sorted(scheduler.finished_req_ids)
        output = scheduler.schedule()
        rows = output.num_scheduled_tokens
        live = scheduler.requests
        proposed = output.scheduled_spec_decode_tokens
        verified = (
            {i: len(proposed.get(i, ())) for i in rows} if proposed else dict.fromkeys(rows, 0)
        )
        start, emits, decodes = {}, [], 0
        for i, n in rows.items():
            request, drafts = live[i], verified[i]
            start[i] = before = request.num_computed_tokens - n
            ahead = getattr(request, "num_output_placeholders", 0)  # tokens in flight
            if before + n >= lengths[i] + max(ahead - 1 - drafts, 0):
                emits.append(i)
                # The next token and its drafts follow the newest emitted token.
                decodes += n - drafts == 1 and before >= request.num_prompt_tokens
        kind = "mixed" if decodes else "prefill"
        if decodes == len(rows):
            kind = "decode" if decodes else "idle"
        self.drafted -= {name_of(i) for i in self.freed}
        real = {i: n if i in self.drafted else 0 for i, n in verified.items() if n}
        if self.config.num_speculative_tokens:
            self.drafted = {*emits} | (self.drafted - rows.keys())
        return Launched(output, rows, start, emits, kind, verified, real)

    def deliver(
        self, launched: Launched, counts: Mapping[str, int], ended: Collection[str], report: Any
    ) -> None:
        """Deliver numbers of new tokens, stop tokens of ``ended``, and the KV worker's report."""
        ids = list(launched.rows)
        tokens = {
            i: [self.number(f"o{int(i)}", self.outputs(i) + k) for k in range(n)]
            for i, n in counts.items()
        }
        for i in ended:
            if tokens.get(i):
                self.stops[i].append(tokens[i][-1])
        self.scheduler.update_from_output(
            launched.output,
            ConfigStub(
                sampled_token_ids=[Tokens(tokens.get(i, ())) for i in ids],
                req_id_to_index={i: k for k, i in enumerate(ids)},
                prompt_logprobs_dict={},
                prompt_token_id_logprobs_dict={},
                kv_connector_output=report,
            ),
        )
        if self.config.num_speculative_tokens and self.config.depth == 1:
            ngrams = self.config.speculative_method == "ngram"  # proposes only after a token
            drafts = [-2] * self.config.num_speculative_tokens
            proposed = [[] if ngrams and i not in launched.emits else drafts[:] for i in ids]
            self.scheduler.update_draft_token_ids(ConfigStub(req_ids=ids, draft_token_ids=proposed))

    def waiting(self) -> list[Any]:
        """Return the waiting requests in the order in which vLLM considers them."""
        waiting = [*self.scheduler.waiting]
        skipped = [*getattr(self.scheduler, "skipped_waiting", ())]  # name from 0.18 to 0.30
        holding = [*getattr(self.scheduler, "kv_holding_waiting", ())]
        if holding:
            return [*holding, *waiting]
        if self.config.policy == "priority" and skipped:
            return sorted([*skipped, *waiting])
        return [*skipped, *waiting]

    def is_over(self, i: str) -> bool:
        """Return whether a request has ended."""
        request = self.scheduler.requests.get(i)
        return request is None or request.is_finished()

    def outputs(self, i: str) -> int:
        request = self.scheduler.requests.get(i)
        return request.num_output_tokens if request else 0

    def blocks(self, i: str) -> list[int]:
        """Return the ids of a request's blocks in all layer groups, without freed blocks."""
        manager = self.scheduler.kv_cache_manager
        coordinator = getattr(manager, "coordinator", None)  # 0.9.0 has only one layer group
        managers = (
            coordinator.single_type_managers if coordinator else [manager.single_type_manager]
        )
        tables = [manager.req_to_blocks.get(i, []) for manager in managers]
        null = self.pool.null_block
        return [block.block_id for table in tables for block in table if block is not null]

    def _hashes(self, request: Any) -> list[bytes]:
        """Return the keys of full blocks of ``request`` that have no key yet."""
        size, keys = self.config.block_size, list(request.block_hashes)
        known, ahead = len(keys), self.speculation["num_hash_lookahead_tokens"]
        lora = request.lora_request.lora_name if request.lora_request else ""
        for index in range(known, (request.num_tokens - ahead) // size):
            tokens = tuple(request.all_token_ids[index * size : (index + 1) * size + ahead])
            number = self.number(keys[-1] if keys else b"", tokens, lora)
            keys.append(number.to_bytes(8, "big"))
        return keys[known:]

    def add(self, prompt: Prompt, transfer: str | None = None) -> None:
        """Add a request. ``transfer`` is ``send`` or ``load`` if its KV is sent or loaded."""
        tokens = [
            self.number(stream, position)
            for stream, start, end in prompt.segments
            or [Segment(f"u{prompt.id}", 0, prompt.prompt_tokens)]
            for position in range(start, end)
        ]
        stops = self.stops[name_of(prompt.id)] = []
        sampling = ConfigStub(
            max_tokens=prompt.max_tokens,
            min_tokens=0,
            eos_token_id=-1,
            ignore_eos=False,
            # A proxy requests this number of tokens from the prefill replica.
            stop_token_ids=() if transfer == "send" else stops,
            extra_args=sampling_extra_args(prompt, transfer, self.config.block_size),
            skip_reading_prefix_cache=False,
        )
        images = ("inputs", "kwargs", "hashes", "placeholders")  # some releases require them
        kind = importlib.import_module("vllm.v1.request").Request
        name, lora = prompt.lora, None
        if name is not None:  # vLLM numbers adapters from 1
            number = self.loras.setdefault(name, len(self.loras) + 1)
            lora = ConfigStub(lora_int_id=number, adapter_id=number, lora_name=name, name=name)
        self.scheduler.add_request(
            kind(
                request_id=name_of(prompt.id),
                prompt_token_ids=tokens,
                sampling_params=sampling,
                lora_request=lora,
                **accepted_fields(
                    kind,
                    arrival_time=prompt.arrival,
                    priority=prompt.priority,
                    eos_token_id=-1,
                    pooling_params=None,
                    block_hasher=self._hashes,
                    **dict.fromkeys(f"multi_modal_{what}" for what in images),
                ),
            )
        )

    def _scheduler(self) -> Any:
        config = self.config
        knobs = {
            k: v for k, v in dataclasses.asdict(config).items() if k not in ("name", "variant")
        }
        # vLLM settings that simkv does not model are off.
        off = dict.fromkeys(("max_num_encoder_input_tokens", "encoder_cache_size"), 0)
        rules = find_rules(config.variant)
        if rules.reserves_draft_slots and config.num_speculative_tokens:
            off["max_num_scheduled_tokens"] = config.most_scheduled(rules)
        native = {name: dict(options) for name, options in self.native.items()}
        scheduler_config = ConfigStub(
            knobs
            | off
            | {"chunked_prefill_enabled": config.enable_chunked_prefill}
            | native.get("SchedulerConfig", {})
        )
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        groups = [
            interface.KVCacheGroupSpec(
                layer_names=[f"layer {g}"], kv_cache_spec=_layers(interface, config, kind)
            )
            for g, kind in enumerate(config.layer_kinds)
        ]
        sizes = {group.kv_cache_spec.block_size for group in groups}
        kind = interface.KVCacheConfig
        interval = {"prefix_cache_retention_interval": config.retention_interval(rules)}
        tensors = (
            [ConfigStub(size=BLOCK_BYTES * config.num_gpu_blocks)] if self.worker.works else []
        )
        cache = kind(config.num_gpu_blocks, tensors, groups, **accepted_fields(kind, **interval))
        managers = importlib.import_module(CORE + "single_type_kv_cache_manager")
        if hasattr(managers, "register_all_kvcache_specs"):
            managers.register_all_kvcache_specs(ImportStub())
        module = "async_scheduler" if config.async_scheduling else "scheduler"
        cls = "AsyncScheduler" if config.async_scheduling else "Scheduler"
        kind = self.instead(getattr(importlib.import_module(CORE + "sched." + module), cls))
        return kind(
            vllm_config=ConfigStub(
                scheduler_config=scheduler_config,
                cache_config=ConfigStub(
                    knobs
                    | interval
                    | {"mamba_cache_mode": _mode(config), "cache_dtype": "auto"}
                    | native.get("CacheConfig", {})
                ),
                model_config=ConfigStub(
                    model="any", max_model_len=config.max_model_len, get_total_num_kv_heads=int
                ),
                lora_config=ConfigStub(max_loras=config.max_loras) if config.enable_lora else None,
                parallel_config=OneRank(),
                observability_config=ConfigStub(per_request_spec_decode_metrics="none"),
                aux_output_config=ConfigStub(),
                ec_manager_config=ConfigStub(get_encoder_cache_manager_obj=lambda: None),
                max_in_flight_tokens=config.depth * config.max_num_batched_tokens,
                **self.speculation,
                **self.worker.given,
            ),
            kv_cache_config=cache,
            structured_output_manager=ConfigStub(
                should_advance=lambda *_, **__: False,
                accept_tokens=lambda *_, **__: True,
                validate_tokens=lambda _, tokens: tokens,
                grammar_bitmask=lambda *_, **__: None,
            ),
            log_stats=False,
            **accepted_fields(kind, block_size=lcm(*sizes), hash_block_size=gcd(*sizes)),
            mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda _: False),
        )


def _mode(config: VllmConfig) -> str:
    """Return the caching mode for recurrent states that vLLM determines at start-up."""
    return config.states(find_rules(config.variant)) if config.has_states else "none"


def _layers(interface: Any, config: VllmConfig, group: LayerKind) -> Any:
    """Return vLLM's KV cache specification of a layer group."""
    window, chunk, states, size = group
    kind = interface.SlidingWindowSpec if window else interface.FullAttentionSpec
    kind = interface.MambaSpec if states else kind
    kind = interface.ChunkedLocalAttentionSpec if chunk else kind
    spec = kind.__new__(kind)
    for known in dataclasses.fields(kind):
        unset = known.default is dataclasses.MISSING
        object.__setattr__(spec, known.name, None if unset else known.default)
    mode = _mode(config)
    size = config.max_model_len if states and mode == "none" else size
    given: dict[str, Any] = {"block_size": size, "sliding_window": window or None}
    given |= {"attention_chunk_size": chunk or None}
    if states:  # the same number of bytes as a block of the other groups
        given = {"block_size": size, "mamba_cache_mode": mode, "shapes": (), "dtypes": ()}
        given["num_speculative_blocks"] = config.num_speculative_tokens
        if config.mamba_prefill_checkpoints:
            given |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    for name, value in given.items():
        object.__setattr__(spec, name, value)
    return spec
