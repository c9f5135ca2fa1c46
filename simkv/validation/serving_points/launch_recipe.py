"""Launch configuration of a point: number formats, engine flags, clients and assumptions.

Source: the scripts of SemiAnalysisAI/InferenceX (Apache-2.0) at the dates of the points:
benchmarks/70b_fp8_{h200_slurm,b200_docker}.sh and 70b-tmpl.yml at ac1998a50; single_node/
gptoss_fp4_*.sh at 626932a11; minimaxm2.5_fp8_{b200,h200}.sh, dsr1_fp4_b200.sh and
qwen3.5_fp8_b200.sh at 165968ea7; dsr1_fp8_b200.sh at 16ffb6581; dsr1_fp8_h200.sh at 161e7f65b;
qwen3.5_fp8_h200.sh at 2116fc435, qwen3.5_bf16_b200.sh at 29d69fa54; glm5_fp8_{b200,h200}.sh at
4eca3fe00 and 0c82808de; kimik2.5_{int4_h200,fp4_b200}.sh at 34bc7c409 and 04107b3d5;
qwen3.5_fp4_b200.sh at 088fe6634, glm5_fp4_b200.sh at 405c601e9, qwen3.5_{fp8,fp4}_b300.sh at
563248391. Recipes change between runs, and the recipe of a point is not recorded.

NVIDIA does not document how it ran its own points; they are assumed to use the settings of
aiconfigurator's generator (rule_plugin/benchmark and backend_templates/benchmark of the package
aiconfigurator 0.12.0, Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date

from simkv.core.engine_version import is_since
from simkv.core.errors import InputError
from simkv.core.execution_settings import GraphMode
from simkv.costs.hardware.number_formats import FormatName, KvFormatName
from simkv.costs.hardware.replica_hardware import KernelSwitch
from simkv.validation.serving_points.client_lengths import (
    APPROXIMATE_RANGE,
    EXACT_RANGE,
    INFERENCEMAX_RANGE,
)
from simkv.validation.serving_points.measured_rows import MeasuredRow

#: From this date on, the client warms up with twice its concurrency; before, with one request.
WARM_UP_SINCE = date(2026, 1, 21)
INFERENCEMAX_PROTOCOL = "InferenceMAX"
#: Pause of SGLang on Blackwell (s) in the first step with more tokens than the prefill of one
#: request, after a warm-up with a single request. The value is ten times the excess TTFT of such
#: points, because a tenth of the requests waits for the pause. Medians of public points.
COLD_START_S, COLD_START_FP4_S = 14.0, 73.0
#: The same pause for a first step with at most this number of tokens, in configurations where it
#: was observed (fp4).
COLD_START_SMALL_S = 3.0
#: Date of the first release with the longer pause.
COLD_START_SINCE = date(2025, 11, 10)
#: One in this number of prompts is assumed to be new in NVIDIA's vLLM runs.
UNCACHED_EVERY = 5
#: Number of tokens that NVIDIA's generator adds to the prompt length for the token limit of a step.
NVIDIA_EXTRA_TOKENS = 1500


@dataclass(frozen=True)
class Recipe:
    """Configuration of the server of a measured point.

    None means the default of the release. ``mixed`` is true if requests decode in steps with
    prefills. ``radix`` is true if prefixes are cached. ``memory_share`` is the fraction of GPU
    memory that the engine uses. ``ep`` replaces the expert parallel size in the data. ``rounds`` is
    the number of prompts divided by the concurrency. ``shares`` are the smallest and largest length
    as fractions of the stated length. One in ``fresh`` prompts is not in the prefix cache.
    ``kernels`` are selected with options of the server. ``assumed`` contains undocumented facts.
    """

    weights: FormatName
    attention: FormatName | None = None
    experts: FormatName | None = None
    kv: KvFormatName = "bf16"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int = 16
    memory_share: float | None = 0.9
    graph_mode: GraphMode = "full and piecewise"
    largest_graph: int = 512
    asynchronous: bool | None = None
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    recv_interval: int = 1
    stream_interval: int = 1
    mixed: bool = False
    radix: bool = False
    ep: int | None = None
    rounds: int = 10
    shares: tuple[float, float] = INFERENCEMAX_RANGE
    fresh: int = 1
    kernels: tuple[KernelSwitch, ...] = ()
    assumed: tuple[str, ...] = ()


def is_blackwell(row: MeasuredRow) -> bool:
    """Return whether the GPU is a Blackwell GPU. All other GPUs in the data are Hopper GPUs."""
    return row.system.lower().startswith(("b200", "b300", "gb200", "gb300"))


def recipe_of(row: MeasuredRow) -> Recipe:
    """Return the launch configuration of a measured point.

    Raises InputError if the configuration for the model or the precision is unknown.
    """
    name = row.model.lower().rsplit("/", 1)[-1]
    for key, find in _RECIPES.items():
        if key in name:
            found = find(row)
            break
    else:
        found = _dense(row)
    return found if row.protocol == INFERENCEMAX_PROTOCOL else _nvidia(row, found)


def _nvidia(row: MeasuredRow, recipe: Recipe) -> Recipe:
    """Return ``recipe`` with the settings of NVIDIA's benchmark generator."""
    how = "10 x concurrency prompts in a closed loop, all with the stated lengths"
    if row.backend == "vllm" and recipe.fresh > 1:
        how = "10 x concurrency prompts in a closed loop, lengths within 1.5 % of the stated ones"
        recipe = replace(recipe, shares=APPROXIMATE_RANGE)
    elif row.backend == "vllm":
        recipe = replace(
            recipe, shares=EXACT_RANGE, max_num_batched_tokens=row.isl + NVIDIA_EXTRA_TOKENS
        )
        how += f", at most {NVIDIA_EXTRA_TOKENS} tokens per step more than a prompt"
    else:
        recipe = replace(recipe, shares=EXACT_RANGE, memory_share=None)
        # the latencies measured with 0.5.1 are compatible with neither setting
        if row.version != "0.5.1":
            recipe = replace(recipe, mixed=True, max_prefill_tokens=row.isl + NVIDIA_EXTRA_TOKENS)
            how += ", decodes mixed with prefills"
    return replace(recipe, assumed=(*recipe.assumed, f"how it was run: {how}"))


def count_warm_up_requests(row: MeasuredRow) -> int:
    """Return the number of warm-up requests before the counted requests."""
    if row.protocol != INFERENCEMAX_PROTOCOL:
        return 0
    if row.warmup.startswith("1 ") or (row.measured_on and row.measured_on < WARM_UP_SINCE):
        return 1
    return 2 * row.concurrency


def cold_start_s(row: MeasuredRow, recipe: Recipe) -> float:
    """Return the seconds for which the engine pauses after the first requests arrive.

    In the measurements, SGLang pauses on Blackwell GPUs if the warm-up had only one request.
    """
    chunk = recipe.chunked_prefill_size
    if row.backend != "sglang" or not row.warmup.startswith("1 ") or not is_blackwell(row):
        return 0.0
    long = row.precision == "fp4" and row.measured_on and row.measured_on >= COLD_START_SINCE
    if 0.9 * row.isl * row.concurrency <= chunk:
        return COLD_START_SMALL_S if long else 0.0
    return COLD_START_FP4_S if long else COLD_START_S


def _fp(row: MeasuredRow, **known: FormatName) -> FormatName:
    """Return the number format of a model for the precision in ``row``."""
    if row.precision not in known:
        raise InputError(
            f"line {row.line}: precision: no launch recipe for {row.model} with precision "
            f"{row.precision or 'unknown'!r}; known precisions: {', '.join(known)}"
        )
    return known[row.precision]


def _dense(row: MeasuredRow) -> Recipe:
    """Return the recipe of Llama and Qwen3: vLLM 0.10.2 (InferenceMAX) or the defaults (NVIDIA)."""
    if not row.precision and "fp8" not in row.model.lower():
        return Recipe("bf16", assumed=("assumed 16-bit weights and KV: not stated by the source",))
    block = "qwen3" in row.model.lower()
    row = replace(row, precision=row.precision or "fp8")
    weights = _fp(row, fp8="fp8_block" if block else "fp8", fp4="nvfp4", bf16="bf16")
    if row.protocol != INFERENCEMAX_PROTOCOL and row.backend == "vllm":
        # The measured rate exceeds the rate at which the GPU can prefill tokens.
        why = (
            f"{UNCACHED_EVERY - 1} of {UNCACHED_EVERY} prompts hit vLLM's prefix cache, which is "
            "enabled by default"
        )
        return Recipe(weights, fresh=UNCACHED_EVERY, asynchronous=True, assumed=(why,))
    if row.protocol != INFERENCEMAX_PROTOCOL:
        return Recipe(weights)
    return Recipe(
        weights,
        kv="fp8",
        max_num_batched_tokens=8192,
        max_num_seqs=512 if is_blackwell(row) else row.concurrency,
        graph_mode="full decode only" if is_blackwell(row) else "full and piecewise",
        asynchronous=True,
    )


def _gpt_oss(row: MeasuredRow) -> Recipe:
    """Return the recipe of gpt-oss.

    The scripts for releases before 0.14 enable async-scheduling (gptoss_fp4_b200_docker.sh at
    2e46dba03, gptoss_fp4_h200_slurm.sh at 1d889b8d7).
    """
    found = Recipe(
        "bf16",
        experts="mxfp4",
        max_num_batched_tokens=8192,
        max_num_seqs=row.concurrency,
        largest_graph=2048,
        asynchronous=True,
        kernels=("marlin",),
    )
    if is_blackwell(row):
        return replace(found, kv="fp8", max_num_seqs=512, kernels=("mxfp8",))
    if not is_since(row.version or "9999", "0.14"):
        return replace(found, kernels=(), graph_mode="piecewise")
    return found


def _minimax(row: MeasuredRow) -> Recipe:
    weights = _fp(row, fp8="fp8_block", fp4="nvfp4")
    found = Recipe(weights, memory_share=0.95)
    if weights == "nvfp4":
        found = replace(found, attention="bf16")
    if not is_blackwell(row):
        # The script enables expert parallelism whenever EP_SIZE is 1 or more, which is always true.
        return replace(found, ep=row.tp * row.dp)
    if row.measured_on and row.measured_on >= date(2026, 4, 1):
        return replace(
            found,
            kv="fp8",
            max_num_batched_tokens=2 * row.isl,
            block_size=32,
            stream_interval=20,
            memory_share=0.9,
            largest_graph=2048,
        )
    return found


def _kimi(row: MeasuredRow) -> Recipe:
    weights = _fp(row, int4="int4_g32", fp4="nvfp4")
    return Recipe(
        "bf16",
        experts=weights,
        max_num_seqs=row.concurrency,
        # The script for B200 sets 0.90, but the weights of some of these points do not fit into
        # this fraction of memory.
        memory_share=0.95,
    )


def _deepseek(row: MeasuredRow) -> Recipe:
    """Return the SGLang recipe of DeepSeek.

    fp4 means nvidia/DeepSeek-R1-0528-FP4-V2, with attention in 16 bits.
    """
    weights = _fp(row, fp8="fp8_block", fp4="nvfp4")
    found = Recipe(
        weights,
        max_num_seqs=512 if (row.isl, row.osl) == (1024, 1024) else 256,
        memory_share=0.82,
        chunked_prefill_size=32768,
        max_prefill_tokens=32768,
        stream_interval=10,
    )
    if not is_blackwell(row):
        return found
    found = replace(found, kv="fp8", recv_interval=_recv_interval(row), stream_interval=30)
    if row.precision == "fp4":
        return replace(
            found,
            attention="bf16",
            max_num_seqs=256,
            memory_share=0.85,
            chunked_prefill_size=16384,
            max_prefill_tokens=16384,
            stream_interval=10,
        )
    if row.tp == 4:
        return replace(
            found,
            max_num_seqs=32,
            memory_share=0.95,
            chunked_prefill_size=8192,
            max_prefill_tokens=8192,
            recv_interval=10,
        )
    return replace(found, max_num_seqs=128)


def _qwen35(row: MeasuredRow) -> Recipe:
    weights = _fp(row, bf16="bf16", fp8="fp8_block", fp4="nvfp4")
    found = Recipe(
        weights,
        kv="bf16" if weights == "bf16" else "fp8",
        attention="bf16" if weights == "nvfp4" else None,
        max_num_seqs=128,
        memory_share=0.8,
        chunked_prefill_size=16384,
        max_prefill_tokens=16384,
        stream_interval=50,
    )
    if not is_blackwell(row):
        return found
    if row.system == "b300_sxm" and weights == "fp8_block" and row.version.startswith("0.5.10"):
        return replace(found, max_num_seqs=row.concurrency, recv_interval=10)
    fp4_b200 = weights == "nvfp4" and row.system == "b200_sxm"
    return replace(
        found,
        memory_share=0.85 if fp4_b200 else 0.82,
        chunked_prefill_size=32768,
        max_prefill_tokens=32768,
        recv_interval=30 if fp4_b200 else _recv_interval(row),
        stream_interval=30,
    )


def _glm5(row: MeasuredRow) -> Recipe:
    weights = _fp(row, fp8="fp8_block", fp4="nvfp4")
    found = Recipe(weights, memory_share=0.85)
    if not is_blackwell(row):
        why = "SGLang's default number of prompts per prefill"
        return replace(found, radix=True, rounds=5, assumed=(why,))
    if weights == "nvfp4":
        found = replace(found, attention="bf16", memory_share=0.9, recv_interval=10)
    return replace(
        found,
        kv="fp8",
        max_num_seqs=None if weights == "nvfp4" else row.concurrency,
        chunked_prefill_size=32768,
        max_prefill_tokens=32768,
        stream_interval=30,
    )


def _recv_interval(row: MeasuredRow) -> int:
    """Return the number of decode steps between two polls for new requests."""
    return 30 if row.concurrency >= 16 else 10


_RECIPES = {
    "gpt-oss": _gpt_oss,
    "minimax": _minimax,
    "kimi": _kimi,
    "deepseek": _deepseek,
    "qwen3.5": _qwen35,
    "glm-5": _glm5,
}
