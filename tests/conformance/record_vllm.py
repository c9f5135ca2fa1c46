"""Records decisions of the scheduler in a wheel of vLLM, unmodified, on random small workloads.

    pip download --no-deps --only-binary :all: vllm==0.19.0
    unzip vllm-0.19.0-*.whl 'vllm/v1/*' -d SOURCE
    python -m tests.conformance.record_vllm SOURCE 0.19.0 FOLDER [CASE...]

A case is one of ``HAND_MADE`` or ``rand-`` and a number; without any, those that are committed.
Only the scheduler, its block manager and its requests are vLLM's; everything else that they import
(torch, the configuration, the model runner, ...) is replaced by hollow stand-ins, so it runs in a
second and without a GPU. The model is a fake: a request whose last known token is computed emits
one. Written for 0.19.0 and 0.11.0; other versions import other things. Nothing of vLLM is kept
but what it decided.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.versions import RULES, VARIANTS

CORE = "vllm.v1.core."
REAL = {
    *(CORE + "sched." + m for m in ("scheduler", "async_scheduler", "request_queue", "utils")),
    *(CORE + "sched." + m for m in ("output", "interface")),
    *(CORE + m for m in ("kv_cache_manager", "kv_cache_coordinator", "kv_cache_utils")),
    *(CORE + m for m in ("single_type_kv_cache_manager", "block_pool")),
    "vllm.v1.request",
    "vllm.v1.kv_cache_interface",
}
HOLLOW = ("vllm", "torch", "msgspec", "zmq", "cloudpickle", "transformers", "cbor2", "blake3")

#: A case in which so many steps deliver nothing never ends: the longest sequence has fewer tokens.
STANDSTILL = 400


class HollowType(type):
    """A class that stands for any other: it can be subclassed, subscripted and called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return HollowType(name, (Hollow,), {})

    def __getitem__(cls, key: object) -> type:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # it stood for a decorator
        return super().__call__(*args, **kwargs)

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__


class Hollow(metaclass=HollowType):
    """An object that answers everything with nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow()

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else None

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class HollowModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, HollowType(name, (Hollow,), {}))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules in ``REAL`` under ``source`` and makes up all others."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name in REAL:
            file = self.source.joinpath(*name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in HOLLOW:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """The few things that must not be hollow."""
        real: dict[str, Any] = {
            "vllm.logger": {"init_logger": _logger},
            "vllm.utils": {"cdiv": _cdiv, "length_from_prompt_token_ids_or_embeds": _length},
            "vllm.utils.math_utils": {"cdiv": _cdiv},
            "vllm.v1.utils": {
                "ConstantList": _View,
                "record_function_or_nullcontext": lambda _: contextlib.nullcontext(),
            },
            "vllm.v1.structured_output.request": {
                "StructuredOutputRequest": SimpleNamespace(from_sampling_params=lambda _: None)
            },
            "vllm.v1.core.encoder_cache_manager": {"compute_encoder_budget": lambda **_: (0, 0)},
            "vllm.v1.engine": {
                n: type(n, (SimpleNamespace,), {})
                for n in ("EngineCoreOutput", "EngineCoreOutputs")
            },
        }
        module.__dict__.update(real.get(module.__name__, {}))
        module.__path__ = []


def _logger(name: str) -> Any:
    logger = logging.getLogger(name)
    for level in ("debug_once", "info_once", "warning_once"):
        setattr(logger, level, lambda *_, **__: None)
    return logger


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _length(tokens: list[int] | None, _: object) -> int:
    return len(tokens or ())


class _View:
    """A list that can only be read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, key: Any) -> Any:
        return self.items[key]

    def __len__(self) -> int:
        return len(self.items)

    def copy(self) -> list[Any]:
        return self.items.copy()


class Recorder:
    """One case: a scheduler of vLLM and a fake model, as many steps as it takes."""

    def __init__(self, config: VllmConfig, requests: list[dict[str, Any]]) -> None:
        self.config, self.requests = config, requests
        self.numbers: dict[Any, int] = {}
        self.scheduler = self._scheduler()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.left = {r["id"]: r["output_tokens"] for r in requests}
        self.freed: list[int] = []
        manager = self.scheduler.kv_cache_manager
        free = manager.free

        def noting(request: Any) -> None:
            self.freed.append(int(request.request_id))
            free(request)

        manager.free = noting

    def lines(self) -> Iterator[dict[str, Any]]:
        """One line per ``schedule`` call; a closing one if nothing goes on any more."""
        arriving: dict[int, list[dict[str, Any]]] = {}
        for request in self.requests:
            arriving.setdefault(request["arrival_step"], []).append(request)
        alive = {r["id"] for r in self.requests}
        depth = 2 if self.config.async_scheduling else 1
        under_way: deque[Any] = deque()
        step = still = 0
        while alive:
            for request in arriving.pop(step, ()):
                self.scheduler.add_request(self._request(request))
                still = 0
            line, batch = self._schedule()
            under_way.append(batch)
            line |= {"step": step, "delivered": int(len(under_way) == depth), "finished": []}
            if line["delivered"]:
                tokens, line["finished"] = self._deliver(*under_way.popleft(), alive)
                still = 0 if tokens else still + 1
            alive -= set(line["finished"])
            line["waiting"] = [int(r.request_id) for r in self.scheduler.waiting]
            line["running"] = [int(r.request_id) for r in self.scheduler.running]
            line["free_blocks"] = self.pool.get_num_free_blocks()
            yield line
            if still >= STANDSTILL and not arriving:
                yield {"truncated": True, "why": f"no progress: {sorted(alive)}"}
                return
            step += 1

    def _schedule(self) -> tuple[dict[str, Any], tuple[Any, list[str]]]:
        scheduler = self.scheduler
        before = [int(r.request_id) for r in scheduler.running]
        held = {r.request_id: len(self._blocks(r.request_id)) for r in scheduler.running}
        lengths = {i: r.num_tokens for i, r in scheduler.requests.items()}
        self.freed.clear()
        output = scheduler.schedule()
        rows = output.num_scheduled_tokens
        live = scheduler.requests
        start = {i: live[i].num_computed_tokens - n for i, n in rows.items()}
        decodes = [n == 1 and start[i] >= live[i].num_prompt_tokens for i, n in rows.items()]
        kind = "mixed" if any(decodes) else "prefill"
        if all(decodes):
            kind = "decode" if decodes else "idle"
        after = [int(r.request_id) for r in scheduler.running]
        new = {i: self._blocks(i)[held.get(i, 0) :] for i in rows}
        line = {
            "scheduled": [[int(i), n] for i, n in rows.items()],
            "kind": kind,
            "preempted": self.freed.copy(),
            "ignored": [],
            "hits": [[int(i), start[i]] for i in rows if int(i) not in before],
            "running_after_schedule": after,
            "free_blocks_after_schedule": self.pool.get_num_free_blocks(),
        }
        if self.config.enable_prefix_caching:
            line["new_blocks"] = [[int(i), [b.block_id for b in bs]] for i, bs in new.items() if bs]
            cached = sum(b.block_hash is not None for b in self.pool.blocks)
            line["cached_blocks_after_schedule"] = cached
        emits = [
            i
            for i, n in rows.items()
            if start[i] + n >= lengths[i] + max(live[i].num_output_placeholders - 1, 0)
        ]
        return line, (output, emits)

    def _deliver(self, output: Any, emits: list[str], alive: set[int]) -> tuple[int, list[int]]:
        """Give the batch its tokens. Returns how many counted, and who has ended."""
        ids = list(output.num_scheduled_tokens)
        tokens, counted = [], 0
        for i in ids:
            emitted: list[int] = []
            if i in emits:
                counted += int(i) in alive
                self.left[int(i)] -= 1
                nth = -1 if self.left[int(i)] == 0 else self.left[int(i)]
                emitted = [-1 if nth == -1 else self._number(f"o{i}", self._outputs(i))]
            tokens.append(emitted)
        self.scheduler.update_from_output(
            output,
            SimpleNamespace(
                sampled_token_ids=tokens,
                req_id_to_index={i: k for k, i in enumerate(ids)},
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                num_nans_in_logits=None,
                kv_connector_output=None,
                cudagraph_stats=None,
            ),
        )
        return counted, [
            int(i) for i in ids if int(i) in alive and i not in self.scheduler.requests
        ]

    def _outputs(self, i: str) -> int:
        request = self.scheduler.requests.get(i)
        return request.num_output_tokens if request else 0

    def _blocks(self, i: str) -> list[Any]:
        coordinator = self.scheduler.kv_cache_manager.coordinator
        return coordinator.single_type_managers[0].req_to_blocks.get(i, [])

    def _number(self, *what: object) -> int:
        """The same number for the same thing."""
        return self.numbers.setdefault(what, len(self.numbers) + 1)

    def _hashes(self, request: Any) -> list[bytes]:
        """Keys of the full blocks of ``request`` that have none yet."""
        size, keys = self.config.block_size, list(request.block_hashes)
        known = len(keys)
        for index in range(known, request.num_tokens // size):
            tokens = tuple(request.all_token_ids[index * size : (index + 1) * size])
            number = self._number(keys[-1] if keys else b"", tokens)
            keys.append(number.to_bytes(8, "big"))
        return keys[known:]

    def _request(self, line: dict[str, Any]) -> Any:
        tokens = [
            self._number(stream, position)
            for stream, start, end in line["prompt_segments"]
            for position in range(start, end)
        ]
        sampling = SimpleNamespace(
            max_tokens=line["max_tokens"],
            min_tokens=0,
            eos_token_id=-1,
            ignore_eos=False,
            stop_token_ids=(),
            structured_outputs=None,
            extra_args=None,
            prompt_logprobs=None,
            logprobs=None,
            repetition_detection=None,
            skip_reading_prefix_cache=False,
        )
        return importlib.import_module("vllm.v1.request").Request(
            request_id=f"{line['id']:04}",
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=line["timestamp"],
            priority=line["priority"],
            block_hasher=self._hashes,
            **({"eos_token_id": -1} if self.config.variant == "0.11.0" else {}),
        )

    def _scheduler(self) -> Any:
        config = self.config
        knobs = {k: v for k, v in asdict(config).items() if k not in ("name", "variant")}
        # Whatever is not a knob of simkv is off.
        off = dict.fromkeys(
            ("max_num_encoder_input_tokens", "num_speculative_tokens", "encoder_cache_size"), 0
        )
        scheduler_config = Off(
            knobs | off | {"chunked_prefill_enabled": config.enable_chunked_prefill}
        )
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        spec = interface.FullAttentionSpec.__new__(interface.FullAttentionSpec)
        object.__setattr__(spec, "block_size", config.block_size)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
        cache = Off(num_blocks=config.num_gpu_blocks, kv_cache_groups=[group])
        name = (
            "async_scheduler.AsyncScheduler" if config.async_scheduling else "scheduler.Scheduler"
        )
        module, cls = name.split(".")
        kind = getattr(importlib.import_module(CORE + "sched." + module), cls)
        extra = {"block_size": config.block_size} if config.variant != "0.11.0" else {}
        return kind(
            vllm_config=Off(
                scheduler_config=scheduler_config,
                cache_config=Off(knobs),
                model_config=Off(max_model_len=config.max_model_len),
                parallel_config=Off(
                    decode_context_parallel_size=1,
                    prefill_context_parallel_size=1,
                    pipeline_parallel_size=1,
                    data_parallel_rank=0,
                    data_parallel_index=0,
                ),
                observability_config=Off(),
            ),
            kv_cache_config=cache,
            structured_output_manager=Hollow(),
            log_stats=False,
            **extra,
            mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda _: False),
        )


class Off:
    """A configuration in which everything that is not given is None."""

    def __init__(self, given: dict[str, Any] | None = None, **more: Any) -> None:
        self.__dict__.update(given or {})
        self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


def workload(version: str, seed: int) -> tuple[VllmConfig, list[dict[str, Any]]]:
    """A random small case: a tight pool, short requests, some of them with common beginnings."""
    draw = random.Random(f"{version} {seed}")
    fixed = RULES[version].fixed  # type: ignore[index]
    block_size, usable = draw.choice([1, 2, 4, 4, 8]), draw.randint(6, 40)
    most = block_size * usable - draw.randint(0, block_size - 1)
    seqs = draw.randint(1, 12)
    chunked = "enable_chunked_prefill" in fixed or draw.random() < 0.85
    budget = draw.randint(seqs if chunked else max(seqs, most), most + 2 * seqs)
    knobs: dict[str, Any] = {
        "enable_chunked_prefill": chunked,
        "policy": draw.choice(["fcfs", "fcfs", "priority"]),
        "scheduler_reserve_full_isl": draw.random() < 0.8,
        "long_prefill_token_threshold": draw.choice([0, 0, 0, draw.randint(1, most)]),
    }
    config = VllmConfig(
        variant=version,  # type: ignore[arg-type]
        block_size=block_size,
        num_gpu_blocks=usable + 1,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=most,
        enable_prefix_caching=draw.random() < 0.6,
        async_scheduling=draw.random() < 0.5,
        **{k: v for k, v in knobs.items() if k not in fixed},
    )
    requests, step = [], 0
    for i in range(draw.randint(2, 14)):
        step += draw.choice([0, 0, 0, 1, 2, draw.randint(0, 30)])
        prompt = draw.randint(1, min(most - 1, draw.choice([8, 40, 400])))
        outputs = draw.randint(1, draw.choice([4, 20, 60]))
        common = draw.choice([0, draw.randint(0, prompt)])
        pieces = [[draw.choice(["g0", "g1"]), 0, common], [f"u{i}", 0, prompt - common]]
        stop = min(outputs, most - prompt)
        requests.append(
            {
                "id": i,
                "arrival_step": step,
                "prompt_tokens": prompt,
                "output_tokens": stop,
                "max_tokens": outputs + draw.choice([0, 0, 5]),
                "priority": draw.randint(0, 2),
                "timestamp": float(step) if draw.random() < 0.7 else draw.random() * step,
                "prompt_segments": [piece for piece in pieces if piece[2]],
            }
        )
    return config, requests


def _asks(*rows: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """Requests as (arrival step, prompt, outputs, priority), that share nothing."""
    return [
        {
            "id": i,
            "arrival_step": step,
            "prompt_tokens": prompt,
            "output_tokens": outputs,
            "max_tokens": outputs,
            "priority": priority,
            "timestamp": float(i),
            "prompt_segments": [[f"u{i}", 0, prompt]],
        }
        for i, (step, prompt, outputs, priority) in enumerate(rows)
    ]


def _victim_sat_out(version: Any) -> tuple[VllmConfig, list[dict[str, Any]]]:
    """The victim's last token is under way when another needs its block (issue #49097)."""
    config = VllmConfig(
        variant=version,
        block_size=4,
        num_gpu_blocks=9,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=32,
        policy="priority",
        async_scheduling=True,
    )
    return config, _asks((0, 15, 2, 9), (1, 8, 6, 0), (1, 5, 6, 0))


def _outgrows_the_cache(version: Any) -> tuple[VllmConfig, list[dict[str, Any]]]:
    """One request and a cache that start-up accepted, but for the null block (#47272)."""
    config = VllmConfig(
        variant=version,
        block_size=4,
        num_gpu_blocks=8,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        max_model_len=32,
    )
    return config, _asks((0, 27, 5, 0))


HAND_MADE = {"victim-sat-out": _victim_sat_out, "outgrows-the-cache": _outgrows_the_cache}
COMMITTED = {
    "0.19.0": ["victim-sat-out", "outgrows-the-cache", "rand-067", "rand-100", "rand-102"],
    "0.11.0": ["outgrows-the-cache"],
}
#: Of the random cases so many are committed, from the first.
RANDOM_COMMITTED = 24


def case(version: str, name: str) -> Iterator[dict[str, Any]]:
    """The header and the lines of a case."""
    if name in HAND_MADE:
        config, requests = HAND_MADE[name](version)
    else:
        config, requests = workload(version, int(name.removeprefix("rand-")))
    recorded = asdict(config)
    for knob in ("async_scheduling", "scheduler_reserve_full_isl"):
        if recorded[knob] is None:
            recorded[knob] = getattr(RULES[version], knob)
    yield {
        "format": 1,
        "engine": "vllm",
        "variant": version,
        "source": VARIANTS[version].source,
        "case": name,
        "config": recorded,
        "requests": requests,
    }
    yield from Recorder(replace(config, **recorded), requests).lines()


def main(source: str, version: str, folder: str, *cases: str) -> None:
    sys.meta_path.insert(0, Finder(Path(source)))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    random_cases = [f"rand-{seed:03}" for seed in range(RANDOM_COMMITTED)]
    for name in cases or (*random_cases, *COMMITTED[version]):
        text = "".join(json.dumps(x, separators=(",", ":")) + "\n" for x in case(version, name))
        (target / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
