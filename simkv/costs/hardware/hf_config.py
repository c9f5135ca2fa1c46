"""Read architectures from a Hugging Face ``config.json``.

Only fields that determine shapes are read. An unsupported model type or field raises InputError.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError, spelling_hint
from simkv.core.input_files import read_bytes
from simkv.costs.hardware.config_fields import ConfigFields
from simkv.costs.hardware.hybrid_models import HYBRIDS
from simkv.costs.hardware.model_architecture import (
    Architecture,
    Attention,
    DenseMlp,
    GatedDeltaNet,
    Gqa,
    Indexer,
    LayerSpec,
    Mla,
    Mlp,
    MoeMlp,
    PublishedFormats,
    RopeScaling,
)
from simkv.costs.hardware.number_formats import FormatName

#: Model types by kind of attention.
_GQA = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3"),
    *("gpt_oss", "minimax_m2", "glm4_moe", "gemma2", "gemma3_text"),
)
_MLA = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa")
_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
#: Multimodal model types whose decoder is described in ``text_config``; the vision tower is
#: ignored.
_WRAPPED = (
    "qwen3_5",
    "qwen3_5_moe",
    "kimi_k25",
    "gemma3",
    "gemma4",
    "mistral3",
    "qwen3_vl",
    "qwen3_vl_moe",
    "llama4",
)
_OF_WRAPPED = {
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "llama4": "llama4_text",
}

#: Fields that may contain the maximum length in tokens, and vLLM's default if all are missing
#: (``vllm/config/model.py:_get_and_verify_max_len``).
LENGTHS = ("max_position_embeddings", "max_seq_len", "model_max_length")
NO_LENGTH = 2048

#: Fields that change the layers in unsupported ways, with the only supported value of each.
_NOT_MODELLED: dict[str, Any] = {
    "attention_chunk_size": None,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "index_topk_freq": None,
    "compress_ratios": None,
    "layer_group_size": None,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
}
#: Fields of ``_FIXED`` for which certain model types support other values.
_OWN = {
    "llama4_text": ("attention_chunk_size",),
    "gemma4_text": ("attention_k_eq_v", "num_global_key_value_heads"),
}


def parse_architecture(config: Mapping[str, Any] | Path, name: str | None = None) -> Architecture:
    """Parse a ``config.json``, given as its path or its content.

    Raises InputError, with the file and the field, if the file cannot be read or the model is not
    supported.
    """
    if isinstance(config, Path):
        try:
            data = json.loads(read_bytes(config).decode("utf-8", errors="replace"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{config}: not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise InputError(f"{config}: must be a JSON object, as in a Hugging Face config.json")
        return _Reader(data, str(config)).architecture(name or str(data.get("_name_or_path") or ""))
    return _Reader(config, name or "config.json").architecture(name or "")


class _Reader(ConfigFields):
    """Parser of one ``config.json``. Its errors contain the name of the file."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        super().__init__(config, where)
        self.whole = config
        kind = config.get("model_type")
        if kind in _WRAPPED:
            inner = config.get("text_config")
            if not isinstance(inner, dict):
                raise self.field_error(
                    "text_config", "missing; expected the settings of the language model (decoder)"
                )
            self.config = inner
            kind = inner.get("model_type", kind)
        self.kind = _OF_WRAPPED.get(str(kind), str(kind))
        known = (*_GQA, *_MLA, *_DELTA, *HYBRIDS)
        if self.kind not in known:
            raise self.field_error(
                "model_type",
                f"unsupported model type {kind!r}{spelling_hint(self.kind, known)}; "
                f"expected one of {', '.join(sorted((*known, *_WRAPPED)))}",
            )
        for field, harmless in _NOT_MODELLED.items():
            if self.config.get(field) not in (None, harmless) and field not in _OWN.get(
                self.kind, ()
            ):
                raise self.field_error(field, "not supported: it changes the layers")

    def architecture(self, name: str) -> Architecture:
        depth = self.number("num_hidden_layers")
        if self.kind in HYBRIDS:
            layers = HYBRIDS[self.kind](self)
        else:
            mlps = [self.mlp(layer) for layer in range(depth)]
            layers = list(zip(self.attentions(depth), mlps, strict=True))
        counted = Counter(layers)
        tied = self.config.get("tie_word_embeddings", self.whole.get("tie_word_embeddings"))
        return Architecture(
            name=name or f"{self.kind} of {self.where}",
            hidden=self.number("hidden_size"),
            vocab=self.number("vocab_size"),
            tied=bool(self.kind.startswith("gemma") if tied is None else tied),
            max_model_len=self.number(*LENGTHS, default=NO_LENGTH),
            layers=tuple(LayerSpec(count, *kinds) for kinds, count in counted.items()),
            published=self.published(),
            source=self.where,
            rope=self.rope(),
            model_type=str(self.whole.get("model_type", "")),
        )

    def rope(self) -> RopeScaling | None:
        """Return the scaling of rotary positions, or None if the config specifies none."""
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters")
        if not isinstance(scaling, dict):
            return None
        kind = scaling.get("rope_type", scaling.get("type"))
        factor, trained = scaling.get("factor"), "original_max_position_embeddings"
        original = scaling.get(trained, self.config.get(trained))
        if kind is None:
            return None
        return RopeScaling(
            str(kind),
            float(factor) if isinstance(factor, int | float) else 1.0,
            original if isinstance(original, int) else None,
        )

    def attentions(self, depth: int) -> list[Attention]:
        if self.kind in _MLA:
            return [self.mla()] * depth
        types = self.config.get("layer_types") or self.pattern(depth)
        if not isinstance(types, list) or len(types) != depth:
            raise self.field_error(
                "layer_types", f"must be a list of {depth} names, one name per layer"
            )
        known = {kind: self.attention(str(kind)) for kind in dict.fromkeys(types)}
        return [known[kind] for kind in types]

    def pattern(self, depth: int) -> list[str]:
        """Return the type of each layer, for a config without ``layer_types``."""
        if self.kind in _DELTA:
            every = self.number("full_attention_interval", default=4)
            whole, others = "full_attention", "linear_attention"
        elif self.kind in ("gemma2", "gemma3_text"):
            every = self.number("sliding_window_pattern", default=2 if self.kind == "gemma2" else 6)
            whole, others = "full_attention", "sliding_attention"
        else:
            window = self.config.get("sliding_window")
            used = self.config.get("use_sliding_window", True)
            return ["sliding_attention" if window and used else "full_attention"] * depth
        return [others if (layer + 1) % every else whole for layer in range(depth)]

    def attention(self, kind: str) -> Attention:
        if kind == "linear_attention" and self.kind in _DELTA:
            return GatedDeltaNet(
                self.number("linear_num_key_heads"),
                self.number("linear_num_value_heads"),
                self.number("linear_key_head_dim"),
                self.number("linear_value_head_dim"),
                self.number("linear_conv_kernel_dim"),
            )
        if kind not in ("full_attention", "sliding_attention"):
            raise self.field_error(
                "layer_types",
                f"unsupported layer type {kind!r}; expected full_attention, sliding_attention"
                + (" or linear_attention" if self.kind in _DELTA else ""),
            )
        heads = self.number("num_attention_heads")
        return Gqa(
            heads,
            self.number("num_key_value_heads", default=heads),
            self.number("head_dim", default=self.number("hidden_size") // heads),
            self.number("sliding_window") if kind == "sliding_attention" else 0,
            output_gate=self.kind in _DELTA,
        )

    def mla(self) -> Mla:
        sparse = self.config.get("index_topk") and Indexer(
            self.number("index_n_heads"),
            self.number("index_head_dim"),
            self.number("index_topk"),
        )
        return Mla(
            self.number("num_attention_heads"),
            self.number("q_lora_rank", default=0, least=0),
            self.number("kv_lora_rank"),
            self.number("qk_nope_head_dim"),
            self.number("qk_rope_head_dim"),
            self.number("v_head_dim"),
            sparse or None,
        )

    def mlp(self, layer: int) -> Mlp:
        experts = self.number(
            *("n_routed_experts", "num_local_experts", "num_experts"), default=0, least=0
        )
        alone = self.config.get("mlp_only_layers") or []
        first = self.number("first_k_dense_replace", default=0, least=0)
        step = self.number("decoder_sparse_step", "moe_layer_freq", default=1)
        if not experts or layer < first or layer in alone or (layer - first + 1) % step:
            return DenseMlp(self.number("intermediate_size"))
        width = self.number("moe_intermediate_size", "intermediate_size")
        shared = self.number(
            *("shared_expert_intermediate_size", "shared_intermediate_size"), default=0, least=0
        ) or width * self.number("n_shared_experts", default=0, least=0)
        return MoeMlp(experts, self.number("num_experts_per_tok"), width, shared)

    def published(self) -> PublishedFormats:
        """Return the number formats of the published weights, read from ``quantization_config``."""
        told = self.whole.get("quantization_config") or self.config.get("quantization_config")
        if not told:
            return PublishedFormats()
        method = str(told.get("quant_method"))
        if method == "mxfp4":
            return PublishedFormats("bf16", experts="mxfp4")
        if method == "fp8":
            return PublishedFormats("fp8_block" if told.get("weight_block_size") else "fp8")
        if method in ("awq", "gptq") and told.get("bits", told.get("w_bit", 4)) == 4:
            return PublishedFormats("int4")
        if method == "compressed-tensors":
            return self.compressed(told)
        raise self.field_error(
            "quantization_config",
            f"unsupported quant_method {method!r}; expected fp8, mxfp4, awq or gptq with "
            "4 bits, or compressed-tensors",
        )

    def compressed(self, told: Mapping[str, Any]) -> PublishedFormats:
        groups = told.get("config_groups")
        groups = groups if isinstance(groups, dict) else {}
        weights = [group.get("weights") or {} for group in groups.values()]
        if len(weights) != 1:
            raise self.field_error(
                "quantization_config", f"must have one config_groups entry, got {len(weights)}"
            )
        bits, group = weights[0].get("num_bits"), weights[0].get("group_size")
        kind = weights[0].get("type")
        names: dict[tuple[Any, Any, Any], FormatName] = {
            ("int", 4, 32): "int4_g32",
            ("int", 4, 128): "int4",
            ("float", 8, None): "fp8",
            ("float", 8, 128): "fp8_block",
            ("float", 4, 16): "nvfp4",
            ("float", 4, 32): "mxfp4",
        }
        name = names.get((kind, bits, group))
        if name is None:
            raise self.field_error(
                "quantization_config",
                f"unsupported format: {bits}-bit {kind} in groups of {group}; supported: "
                f"{', '.join(f'{b}-bit {k} in groups of {g}' for k, b, g in names)}",
            )
        skipped = " ".join(str(pattern) for pattern in told.get("ignore") or [])
        if "self_attn" in skipped or "attention" in skipped:
            only_experts = "shared_experts" in skipped or "mlp.(gate" in skipped
            return PublishedFormats("bf16" if only_experts else name, "bf16", experts=name)
        return PublishedFormats(name)
