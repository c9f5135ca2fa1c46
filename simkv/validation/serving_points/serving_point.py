"""Build the simulation of a measured row: hardware, engine with its scheduling rules, and
clients.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from simkv.core.engine_version import (
    count_releases,
    find_version,
    is_since,
    nearest_release,
    parse_version,
    plain_release,
)
from simkv.core.errors import InputError
from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import Hardware, make_hardware
from simkv.costs.operators.configuration_kind import Configuration, classify_configuration
from simkv.schedulers.engine_registry import ENGINES
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig
from simkv.validation.serving_points.closed_loop_replay import ClosedLoop
from simkv.validation.serving_points.kv_tokens import kv_tokens
from simkv.validation.serving_points.launch_recipe import Recipe, cold_start_s, recipe_of
from simkv.validation.serving_points.measured_rows import MeasuredRow

#: Defaults of ``vllm serve`` on a GPU with at least 70 GiB.
VLLM_TOKENS, VLLM_SEQS = 8192, 1024
SGLANG_SEQS = 2048
#: Difference between the scripts' length limit and the longest request, in tokens.
SPARE_LENGTH = 200


@dataclass(frozen=True)
class ServingPoint:
    """Simulation setup of a published measurement, which is a row of a table.

    ``releases`` is the number of releases between the simulated release and the release in the row.
    ``notes`` list assumptions and differences from the row.
    """

    hardware: Hardware
    setting: ExecutionSettings
    engine: Any
    load: ClosedLoop
    releases: int = 0
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> Configuration:
        """Kind of configuration, which determines the cost constants and the error intervals."""
        return classify_configuration(self.hardware, self.setting)

    @property
    def key(self) -> str:
        """Key of the point. Points with the same key have the same result."""
        return repr((self.costs_key, self.engine, self.load))

    @property
    def costs_key(self) -> str:
        """Key of the step costs. Points with the same key have the same step costs."""
        return repr((self.hardware, self.setting))


def point_of(row: MeasuredRow) -> ServingPoint:
    """Return the simulation setup for ``row``. Raises InputError for an unknown value in the
    row.
    """
    recipe = recipe_of(row)
    architecture, gpu = find_architecture(row.model), find_gpu(row.system)
    hardware = make_hardware(
        gpu,
        architecture,
        tp=row.tp,
        dp=row.dp,
        ep=recipe.ep or row.ep,
        weights=recipe.weights,
        attention=recipe.attention or recipe.weights,
        experts=(recipe.experts or recipe.weights) if architecture.experts else recipe.weights,
        kv=recipe.kv,
        kernels=recipe.kernels,
    )
    variant, releases = nearest_variant(row.backend, row.version)
    notes = list(recipe.assumed)
    if releases or not row.version:
        notes.append(
            f"rules of {row.backend} {variant} used for {row.version or 'an unknown release'}"
        )
    if row.dp > 1:
        notes.append(f"{row.dp} attention ranks in lockstep")
    if cold := cold_start_s(row, recipe):
        notes.append(f"initial pause of {cold:g} s, because only one request warmed up the server")
    setting = _setting(row, recipe)
    tokens = kv_tokens(hardware, setting)
    longest = int(1.1 * (row.isl + row.osl)) + SPARE_LENGTH
    if tokens < row.isl + row.osl:
        raise InputError(
            f"only {tokens} tokens of KV fit into memory beside the weights, but a request "
            f"needs {row.isl + row.osl}"
        )
    tokens = max(tokens, longest + setting.block_size)
    engine: Any
    if row.backend == "vllm":
        engine = _vllm(recipe, variant, setting, tokens, longest)
    else:
        engine = _sglang(recipe, variant, setting, tokens)
    # Without prefix caching, a warm-up has no lasting effect; see ``count_warm_up_requests``.
    load = ClosedLoop(
        row.isl,
        row.osl,
        row.concurrency,
        recipe.rounds * row.concurrency,
        shares=recipe.shares,
        fresh=recipe.fresh,
        warm_up=0 if recipe.fresh == 1 else 1,
        cold_s=cold,
    )
    return ServingPoint(hardware, setting, engine, load, releases, tuple(notes))


def nearest_variant(backend: str, version: str) -> tuple[str, int]:
    """Return the simulated release nearest to ``version``, and its distance in releases.

    Ties go to the older release. Without a version, the oldest release is returned, and the
    distance is the number of all releases.
    """
    spec = ENGINES[backend]
    released = [name for name in spec.variants if plain_release(name) == name]
    if find_version(version) is None:
        return min(released, key=parse_version), len(released)
    with contextlib.suppress(ValueError):
        if (known := spec.naming.variant_of(version)) in released:
            return known, 0
    name = nearest_release(version, released)
    return name, abs(count_releases(name, version, spec.release_part))


def _setting(row: MeasuredRow, recipe: Recipe) -> ExecutionSettings:
    vllm = row.backend == "vllm"
    seqs = recipe.max_num_seqs or (VLLM_SEQS if vllm else SGLANG_SEQS)
    # If the script's limit is below the point's concurrency, the actual limit is not recorded.
    seqs = max(seqs, row.concurrency)
    tokens = (recipe.max_num_batched_tokens or VLLM_TOKENS) if vllm else recipe.chunked_prefill_size
    return ExecutionSettings(
        row.backend,
        row.version,
        max(tokens, seqs),
        seqs,
        graph_sizes=graph_sizes(recipe.largest_graph if vllm else min(seqs, 512)),
        graph_mode=recipe.graph_mode if vllm else "full decode only",
        asynchronous=recipe.asynchronous if recipe.asynchronous is not None else _async(row),
        block_size=recipe.block_size,
        memory_share=recipe.memory_share,
    )


def _async(row: MeasuredRow) -> bool:
    """Return whether the engine overlaps steps.

    SGLang does since 0.4, and vLLM does by default since 0.14.
    """
    return row.backend == "sglang" or is_since(row.version or "0", "0.14")


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that have a CUDA graph, up to ``largest``.

    The sizes are 1, 2, 4, then multiples of 8 up to 256, then multiples of 16.
    """
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 1 << 14, 16))
    return tuple(size for size in sizes if size <= largest)


def _vllm(
    recipe: Recipe, variant: str, setting: ExecutionSettings, tokens: int, longest: int
) -> VllmConfig:
    blocks = tokens // setting.block_size + 1
    return VllmConfig(
        variant=variant,
        block_size=setting.block_size,
        num_gpu_blocks=max(blocks, 2),
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_model_len=longest,
        enable_prefix_caching=recipe.fresh > 1,
        async_scheduling=setting.asynchronous,
        startup_check=False,
    )


def _sglang(recipe: Recipe, variant: str, setting: ExecutionSettings, tokens: int) -> SglangConfig:
    return SglangConfig(
        variant=variant,  # type: ignore[arg-type]
        max_total_num_tokens=tokens,
        max_running_requests=setting.max_num_seqs,
        chunked_prefill_size=recipe.chunked_prefill_size,
        max_prefill_tokens=recipe.max_prefill_tokens,
        disable_radix_cache=not recipe.radix,
        enable_mixed_chunk=recipe.mixed,
        scheduler_recv_interval=recipe.recv_interval,
        stream_interval=recipe.stream_interval,
    )
