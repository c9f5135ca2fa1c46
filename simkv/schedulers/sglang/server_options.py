"""Options of ``sglang.launch_server``: conversions to scenario fields, and options that are not
modelled.

``server_options.json`` lists the options of the wheels 0.5.15 to 0.5.23 (``srt/server_args.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from simkv.core.server_options import FieldValues, LaunchOptions, NotModelled, RankOptions

#: Weight formats that ``--quantization`` can set; for other formats, the checkpoint's config states
#: the format.
QUANTIZED = {"fp8": "fp8", "w8a8_fp8": "fp8", "modelopt": "fp8", "modelopt_fp8": "fp8"}
QUANTIZED |= {"modelopt_fp4": "nvfp4", "mxfp4": "mxfp4"}
QUANTIZED |= dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "int4")

_ENCODER = "the encoder and its cache are not modelled; prompts are text"
_KERNELS = "simulated step times do not depend on the choice of kernels"
_GRAPHS = "step times assume CUDA graphs with their default sizes"
_SPREAD = "this kind of parallelism is not modelled"
_HOST = "KV in host memory is not modelled for this engine"


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
    if text.startswith("fp4"):
        return {"hardware.kv": "nvfp4"}
    if text in ("auto", "bf16", "bfloat16"):
        return {}
    raise NotModelled(f"the number format {text} of the KV cache is not modelled")


def place_ranks(ranks: RankOptions) -> Mapping[str, Any]:
    """Return the hardware, fleet and data-parallel fields that match the launcher's options.

    With data-parallel attention, all ranks share the ``tp`` GPUs. Without it, each of the ``dp``
    replicas has ``tp`` GPUs.
    """
    found: dict[str, Any] = {"hardware.tp": ranks.tp}
    groups = ranks.options.get("--attn-dp-size")
    if isinstance(groups, int) and groups > 1:  # since 0.5.23, in place of --enable-dp-attention
        if ranks.dp > 1:
            raise NotModelled(f"--dp-size {ranks.dp} with --attn-dp-size {groups} is not modelled")
        ranks = replace(ranks, dp=groups, options={**ranks.options, "--enable-dp-attention": True})
    ep = ranks.options.get("--ep-size")
    if ranks.experts and isinstance(ep, int) and ep > 1:
        found["hardware.ep"] = ep
    if ranks.dp == 1:
        return found
    if not ranks.options.get("--enable-dp-attention"):
        return {**found, "fleet.replicas": ranks.dp, "fleet.router": "round_robin"}
    if ranks.tp % ranks.dp:
        option = "--attn-dp-size" if groups else "--dp-size"
        raise NotModelled(f"{option} {ranks.dp} must divide --tp-size {ranks.tp}")
    return {
        **found,
        "hardware.tp": ranks.tp // ranks.dp,
        "hardware.dp": ranks.dp,
        "engine.enable_dp_attention": True,
        "engine.dp_size": ranks.dp,
    }


OPTIONS = LaunchOptions(
    __file__,
    programs=(("sglang", "serve"),),
    modules=("sglang.launch_server",),
    images=("lmsysorg/sglang", "sglang"),
    model=("--model-path",),
    model_argument=False,
    tp="--tp-size",
    dp="--dp-size",
    start="python -m sglang.launch_server --model-path {model}",
    ranks=place_ranks,
    converted={
        "--pp-size": lambda size: {"hardware.pp": size} if size != 1 else {},
        "--quantization": _weights,
        "--dtype": _dtype,
        "--kv-cache-dtype": _kv,
        "--ep-size": lambda _: {},
        "--enable-dp-attention": lambda _: {},
        "--dp-size": lambda _: {},
        "--attn-dp-size": lambda _: {},
    },
    neutral={
        "--cpu-offload-gb": ("0",),
        "--nnodes": ("1",),
        "--node-rank": ("0",),
        "--num-continuous-decode-steps": ("1",),
        "--disaggregation-mode": ("null", "None"),
        "--device": ("cuda",),
        "--radix-eviction-policy": ("lru",),
    },
    not_modelled={
        "--(limit-mm|mm-|enable-mm|enable-prefix-mm|enable-broadcast-mm|image-).*": _ENCODER,
        "--(enable-multimodal|encoder-.*|.*mm-feature.*|enable-adaptive-dispatch-.*)": _ENCODER,
        "--(grammar-backend|constrained-json-.*|enable-strict-thinking)": (
            "structured output is not modelled; its grammar costs no time"
        ),
        "--(disaggregation-.*|num-reserved-decode-tokens|optimistic-prefill-.*)": (
            "prefill and decode on separate servers are not modelled for this engine"
        ),
        "--(speculative-.*|spec-.*|decoupled-spec-.*|enable-multi-layer-eagle)": (
            "speculative decoding is not modelled for this engine; it also limits the running "
            "requests to 48 unless --max-running-requests is set"
        ),
        "--(enable-hierarchical-cache|hicache-.*|enable-lmcache|lmcache-.*)": _HOST,
        "--(enable-flexkv|flexkv-.*|radix-cache-backend|enable-session-radix-cache)": _HOST,
        "--radix-eviction-policy": "the cache evicts the least recently used first",
        "--context-length": (
            "the context length of the model is used instead; it only sets the default number of "
            "running requests"
        ),
        "--(attention|decode-attention|prefill-attention|sampling|mamba)-backend": _KERNELS,
        "--(moe-runner|moe-a2a|fp8-gemm-runner|fp4-gemm-runner|bf16-gemm|linear-attn).*": _KERNELS,
        "--(dsa|nsa|dsv4|deepep|flashinfer|triton|monokernel|aiter).*": _KERNELS,
        "--(enable-torch-compile.*|torch-compile-.*|torchao-config|disable-custom-all-reduce)": (
            _KERNELS
        ),
        "--(enable-flashinfer.*|enable-fused.*|disable-flashinfer.*|enable-lean-attention)": (
            _KERNELS
        ),
        "--.*shared-experts-fusion|--enable-(mscclpp|nccl-nvls|symm-mem|torch-symm-mem)": _KERNELS,
        "--.*cuda-graph.*|--enable-cudagraph-gc": _GRAPHS,
        "--(dcp|attn-cp|moe-dp|dwdp|cp|moe-dense-tp)-.*|--.*prefill-cp.*|--.*prefill-context.*": (
            _SPREAD
        ),
        "--(enable-eplb|eplb-.*|ep-(num|dispatch|join).*|init-expert-.*|.*elastic.*)": _SPREAD,
        "--enable-(two|single)-batch-overlap|--tbo-.*|--enable-pdmux|--pdmux-.*": (
            "overlapped batches are not modelled"
        ),
        "--enable-dp-lm-head|--enable-(shared-experts|dense-mlp)-attn-tp|--enable-layernorm-sp": (
            _SPREAD
        ),
        "--pp-.*|--enable-dynamic-chunking|--enable-kv-cache-sharding": _SPREAD,
        "--.*(megamoe|megakernel|monokernel|paged-experts|fused-indexer).*": _KERNELS,
        "--.*swa-bounded-replay|--enable-unified-cache-.*|--enable-linker-.*": _HOST,
        "--load-balance-method": "requests go to the ranks in turn",
        "--(nnodes|node-rank)": "the network between hosts is not modelled",
        "--(cpu-offload-gb|offload-.*|kt-.*)": "offloaded weights are not modelled",
        "--num-continuous-decode-steps": "it is not modelled",
        "--swa-full-tokens-ratio|--disable-hybrid-swa-memory|--.*mamba.*|--enable-unified-memory": (
            "the pools of layers with windows or states have their default sizes"
        ),
        "--enable-hisparse|--hisparse-config|--prefill-only-.*|--is-embedding": (
            "it is not modelled"
        ),
        "--json-model-override-args": "changes of the model's config are not modelled",
        "--enable-deterministic-inference|--rl-.*|--enable-return-.*": "its cost is not modelled",
        "--dllm-.*": "diffusion models are not modelled",
        "--default-priority-value|--abort-on-priority-when-disabled": "it is not modelled",
        "--enable-lora-overlap-loading|--lora-eviction-policy|--max-loaded-loras": (
            "adapters are loaded between steps, and the least recently used one is evicted first"
        ),
        "--device": "only GPUs are modelled",
        "--enable-fp32-lm-head|--quantization-param-path|--modelopt-.*": (
            "all layers are simulated with the same number format"
        ),
    },
)
