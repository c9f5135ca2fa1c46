"""Options of ``vllm serve``: conversions to scenario fields, and options that are not modelled.

``server_options.json`` lists the options of the wheels 0.9.0 to 0.33.0
(``vllm/engine/arg_utils.py`` and ``cli_args.py`` of the entry points).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkv.core.engine_version import is_since
from simkv.core.errors import InputError
from simkv.core.server_options import FieldValues, LaunchOptions, NotModelled, RankOptions

#: Regular expressions for the log lines that report the size of the KV cache.
CACHE_LINES = (
    r"# (?:GPU|cuda) blocks: (?P<blocks>[\d,]+)",
    r"num_gpu_blocks(?:_override)?[=: ]+(?P<blocks>[1-9][\d,]*)\b",
    r"GPU KV cache size: (?P<tokens>[\d,]+) tokens",
)
#: Weight formats that ``--quantization`` can set; for other formats, the checkpoint's config states
#: the format.
QUANTIZED = {"fp8": "fp8", "modelopt": "fp8", "modelopt_fp4": "nvfp4", "mxfp4": "mxfp4"}
QUANTIZED |= dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "int4")
#: Speculative methods in a scenario, by the method in vLLM's config that is scheduled in the same
#: way.
DRAFTS = {"eagle": "eagle", "eagle3": "eagle", "mtp": "mtp"}
DRAFTS |= {"ngram": "ngram", "draft_model": "draft_model"}

_ENCODER = "the encoder and its cache are not modelled; prompts are text"
_KERNELS = "simulated step times do not depend on the choice of kernels"
_OUTPUT = "structured output is not modelled; its grammar costs no time"
_SPREAD = "this kind of parallelism is not modelled"
_OFFLOAD = "offloaded weights are not modelled"
_V0 = "only the V0 engine has it, which is not modelled"


def _weights(method: Any) -> FieldValues:
    if method in QUANTIZED:
        return {"hardware.weights": QUANTIZED[method]}
    raise NotModelled(
        f"{method}: this flag is ignored; the weight format follows from the name of the model"
    )


def _dtype(name: Any) -> FieldValues:
    if name in ("float32", "float"):
        raise NotModelled("32-bit weights are not modelled; they are simulated with 16 bits")
    return {}


def _kv(name: Any) -> FieldValues:
    text = str(name)
    if text.startswith("fp8"):
        return {"hardware.kv": "fp8"}
    if text in ("nvfp4", "fp4"):
        return {"hardware.kv": "nvfp4"}
    if text in ("auto", "bfloat16", "float16", "half"):
        return {}
    raise NotModelled(f"the number format {text} of the KV cache is not modelled")


def _length(value: Any) -> FieldValues:
    # vLLM reads -1 as auto (human_readable_int_or_auto, since 0.14).
    return {"engine.max_model_len": "auto" if value == -1 else value}


def _eager(on: Any) -> FieldValues:
    return {"engine.cudagraph_mode": "NONE"} if on else {}


def _captured(sizes: Any) -> FieldValues:
    return {"engine.cudagraph_capture_sizes": sizes if isinstance(sizes, list) else [sizes]}


def _graph_sizes(sizes: Any) -> FieldValues:
    # A single number is the maximum (cuda_graph_sizes in vllm/config.py of 0.9.2).
    if isinstance(sizes, list) and len(sizes) > 1:
        return _captured(sizes)
    most = sizes[0] if isinstance(sizes, list) else sizes
    return {"engine.max_cudagraph_capture_size": most}


def _level(level: Any) -> FieldValues:
    """Return the CUDA graphs of an optimization level (``OPTIMIZATION_LEVEL_TO_CONFIG`` of
    ``vllm/config/vllm.py``).
    """
    modes = {"0": "NONE", "1": "PIECEWISE"}
    mode = modes.get(str(level))
    return {"engine.cudagraph_mode": mode} if mode else {}


def _compilation(config: Any) -> FieldValues:
    if not isinstance(config, dict):
        return _level(config)
    found: dict[str, Any] = {}
    if mode := config.get("cudagraph_mode"):
        found["engine.cudagraph_mode"] = str(mode).upper()
    if sizes := config.get("cudagraph_capture_sizes"):
        found |= _captured(sizes)
    if most := config.get("max_cudagraph_capture_size"):
        found["engine.max_cudagraph_capture_size"] = most
    return found


def _speculative(config: Any) -> FieldValues:
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config: expected a JSON mapping; found {config!r}")
    drafts, model = config.get("num_speculative_tokens"), str(config.get("model", ""))
    method = str(config.get("method") or ("ngram" if "ngram" in model else ""))
    if not method:  # vLLM detects this method from the name of the draft model
        method = "eagle" if "eagle" in model.lower() else "draft_model"
    if method.endswith("_mtp"):
        method = "mtp"
    if drafts is None or method not in DRAFTS:
        raise NotModelled(f"speculative decoding by {method} is not modelled")
    return {"engine.num_speculative_tokens": drafts, "engine.speculative_method": DRAFTS[method]}


def _engine_generation(on: Any) -> FieldValues:
    if not on:
        raise NotModelled("the V0 engine of releases before 0.11 is not modelled")
    return {}


def _offloading(size: Any) -> FieldValues:
    return {"engine.kv_offloading_size": size} if size else {}


def _api_servers(count: Any) -> FieldValues:
    return {"front_end.processes": count} if isinstance(count, int) and count > 0 else {}


def _backend(name: Any) -> FieldValues:
    if name != "native":
        raise NotModelled(f"the offloading backend {name} is not modelled")
    return {}


def _transfer(config: Any) -> FieldValues:
    extra = config.get("kv_connector_extra_config", {}) if isinstance(config, dict) else {}
    connector = config.get("kv_connector", "") if isinstance(config, dict) else str(config)
    if connector != "OffloadingConnector":
        raise NotModelled(
            f"{connector}: a single launch command has no other replica to exchange KV with; "
            "describe prefill and decode replicas in a fleet section of a scenario"
        )
    names = {"num_cpu_blocks": "num_cpu_blocks", "eviction_policy": "eviction_policy"}
    found = {f"engine.{ours}": extra[name] for name, ours in names.items() if name in extra}
    if "cpu_bytes_to_use" in extra:
        found["engine.kv_offloading_size"] = float(extra["cpu_bytes_to_use"]) / 2**30
    if tiers := extra.get("secondary_tiers"):
        found["engine.secondary_tiers"] = [
            one.get("type", "fs") if isinstance(one, dict) else one for one in tiers
        ]
    return found


def place_ranks(ranks: RankOptions) -> Mapping[str, Any]:
    """Return the hardware and fleet fields for data-parallel ranks.

    The ranks of a mixture-of-experts model share the experts and step together.
    """
    found: dict[str, Any] = {"hardware.tp": ranks.tp}
    experts = bool(ranks.options.get("--enable-expert-parallel"))
    if ranks.experts and experts and ranks.tp * ranks.dp > 1:
        found["hardware.ep"] = ranks.tp * ranks.dp
    if ranks.dp > 1:
        fleet = {"replicas": ranks.dp, "router": "least_loaded", "refresh_interval": BALANCER_S}
        found |= {f"fleet.{name}": value for name, value in fleet.items()}
        if ranks.experts:
            found |= {"hardware.dp": ranks.dp, "fleet.lockstep": True}
    return found


#: First releases that can disable chunked prefills, that do not set the compilation level
#: themselves, and in which ``-O`` is the optimization level.
CHUNKS_OPTIONAL, LEVEL_FREE, OPTIMIZATION_LEVELS = "0.12", "0.10", "0.12"


def ignored_fields(values: Mapping[str, Any], release: str) -> Mapping[str, str]:
    """Return the fields of options that a release ignores.

    Source: ``_set_default_args_v1`` of ``vllm/engine/arg_utils.py``, and ``VllmConfig`` of
    ``vllm/config.py`` (0.9.2).
    """
    found = {}
    if values.get("--enable-chunked-prefill") is False and not is_since(release, CHUNKS_OPTIONAL):
        found["engine.enable_chunked_prefill"] = (
            f"vLLM {release} ignores --no-enable-chunked-prefill: it always chunks prefills"
        )
    level = values.get("--compilation-config")
    if isinstance(level, int) and level < 2 and not values.get("--enforce-eager"):
        since = LEVEL_FREE if level == 0 else OPTIMIZATION_LEVELS
        if not is_since(release, since):
            found["engine.cudagraph_mode"] = (
                f"vLLM {release} ignores -O{level}: it has no optimization levels"
            )
    return found


#: Interval (s) at which data-parallel ranks report the lengths of their queues to the load
#: balancer.
BALANCER_S = 0.1

OPTIONS = LaunchOptions(
    __file__,
    programs=(("vllm", "serve"), ("vllm-cli", "serve")),
    modules=("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"),
    images=("vllm-openai", "vllm/vllm", "rocm/vllm"),
    serving_images=("vllm-openai",),
    model=("--model",),
    model_argument=True,
    tp="--tensor-parallel-size",
    dp="--data-parallel-size",
    start="vllm serve {model}",
    # docs/features/nixl_connector_usage.md: both roles start with the same configuration.
    transfer="""--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'""",
    ranks=place_ranks,
    parts={
        "--spec-method": ("--speculative-config", "method"),
        "--spec-model": ("--speculative-config", "model"),
        "--spec-tokens": ("--speculative-config", "num_speculative_tokens"),
    },
    ignored=ignored_fields,
    inverse_since="0.33",  # EnableDisableAction of vllm/utils/argparse_utils.py
    converted={
        "--pipeline-parallel-size": lambda size: {"hardware.pp": size} if size != 1 else {},
        "--quantization": _weights,
        "--dtype": _dtype,
        "--kv-cache-dtype": _kv,
        "--enforce-eager": _eager,
        "--cudagraph-capture-sizes": _captured,
        "--cuda-graph-sizes": _graph_sizes,
        "--compilation-config": _compilation,
        "--optimization-level": _level,
        "--max-model-len": _length,
        "--kv-cache-memory-bytes": lambda size: {"engine.kv_cache_memory_bytes": size},
        "--speculative-config": _speculative,
        "--kv-offloading-size": _offloading,
        "--kv-offloading-backend": _backend,
        "--kv-transfer-config": _transfer,
        "--api-server-count": _api_servers,
        "--enable-expert-parallel": lambda _: {},
    },
    variables={
        "VLLM_USE_V1": _engine_generation,
        "VLLM_MXFP4_USE_MARLIN": lambda on: {"hardware.kernels": ["marlin"]} if on else {},
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": lambda on: (
            {"hardware.kernels": ["mxfp8"]} if on else {}
        ),
    },
    neutral={
        "--task": ("auto", "generate"),
        "--runner": ("auto", "generate"),
        "--convert": ("auto", "none"),
        "--attention-backend": ("auto",),
        "--performance-mode": ("balanced",),
        "--scheduler-delay-factor": ("0", "0.0"),
        "--num-scheduler-steps": ("1",),
        "--max-num-partial-prefills": ("1",),
        "--max-long-partial-prefills": ("1",),
        "--cpu-offload-gb": ("0",),
        "--decode-context-parallel-size": ("1",),
        "--prefill-context-parallel-size": ("1",),
        "--device": ("auto", "cuda"),
        "--nnodes": ("1",),
        "--headless": ("False",),
    },
    not_modelled={
        "--(limit-mm|mm-|enable-mm|skip-mm|interleave-mm|media-io|video|disable-mm).*": _ENCODER,
        "--(ec-|disable-chunked-mm|enable-multimodal|max-mm).*": _ENCODER,
        "--(guided-decoding|structured-outputs).*": _OUTPUT,
        "--(reasoning-config|diffusion-config|engram-config)": "it is not modelled",
        "--(task|runner|convert|override-pooler-config|pooler-config)": (
            "only generation is modelled"
        ),
        "--(attention-backend|attention-config|moe-backend|linear-backend|mamba-backend)": _KERNELS,
        "--(gdn|kda)-.*|--sparse-indexer.*|--kernel-config|--ir-op-priority": _KERNELS,
        "--(enable-flashinfer-autotune|disable-cascade-attn|disable-custom-all-reduce)": _KERNELS,
        "--(monokernel|enable-hc-sp|enable-bf16x3-router-gemm|.*replayssm.*)": _KERNELS,
        "--mamba-ssu-algorithm|--enable-batch-sharded-sampling": _KERNELS,
        "--(decode|prefill)-context-parallel-size|--(dcp|cp)-.*": _SPREAD,
        "--(enable-dbo|dbo-.*|ubatch-size|all2all-backend|enable-eplb|eplb-.*)": _SPREAD,
        "--(num-redundant-experts|expert-placement-strategy|enable-elastic-ep|elastic-ep-.*)": (
            _SPREAD
        ),
        "--data-parallel-(hybrid-lb|external-lb|multi-port-external-lb|rank|start-rank)": (
            "the engine's own load balancer is simulated"
        ),
        "--data-parallel-size-local|--nnodes|--node-rank|--headless": (
            "the network between hosts is not modelled"
        ),
        "--(cpu-offload-.*|offload-.*)": _OFFLOAD,
        "--(scheduler-cls|worker-cls|worker-extension-cls|model-class-overrides)": (
            "custom code is not run"
        ),
        "--performance-mode": (
            "with throughput, set --max-num-batched-tokens and --max-num-seqs to twice their "
            "defaults"
        ),
        "--(disable-hybrid-kv-cache-manager|disable-sliding-window|kv-sharing-fast-prefill)": (
            "layer groups are derived from the model"
        ),
        "--(kv-cache-dtype-skip-layers|calculate-kv-scales|quantization-config)": (
            "all layers are simulated with the same KV and weight formats"
        ),
        "--mamba-(block-size|cache-dtype|ssm-cache-dtype)|--enable-mamba-.*": (
            "recurrent states are simulated with their default sizes"
        ),
        "--(swa-bounded-replay|prefix-match-unit)": (
            "this change of the prefix cache is not modelled"
        ),
        "--(max-num-partial-prefills|max-long-partial-prefills)": (
            "concurrent partial prefills are not modelled"
        ),
        "--watermark-config": "only --watermark is modelled",
        "--(rope-scaling|rope-theta|hf-overrides|hf-config-path)": (
            "changes of the model's config are not modelled; set --max-model-len for its length"
        ),
        "--(max-prompt-adapter.*|enable-prompt-adapter|prompt-adapters)": (
            "prompt adapters are not modelled"
        ),
        "--(enable-prompt-embeds|enable-return-routed-experts|return-sampling-mask)": (
            "its cost is not modelled"
        ),
        "--(scheduler-delay-factor|num-scheduler-steps|multi-step-stream-outputs)": _V0,
        "--(preemption-mode|num-lookahead-slots|use-v2-block-manager)": _V0,
        "--device": "only GPUs are modelled",
        "--override-neuron-config|--additional-config": "other platforms are not modelled",
        "--dp-sync-interval": "ranks synchronize in every step",
    },
)
