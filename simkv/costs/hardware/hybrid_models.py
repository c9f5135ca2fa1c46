"""Parsers for hybrid models: attention mixed with Mamba, chunked attention or other head shapes.

A ``config.json`` specifies the kinds of layers by a period (Jamba), by a list of names or a letter
pattern (Granite 4, Nemotron-H), or by layer numbers (Bamba, Kimi Linear). Every layer of Falcon-H1
has both attention and Mamba. In Llama 4, layers with rotary positions attend within chunks. In
Gemma 4, layers without a sliding window have fewer and wider heads. State shapes follow
``get_mamba_state_shape_from_config`` of vLLM 0.33.0 (``vllm/model_executor/models``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from simkv.costs.hardware.config_fields import ConfigFields
from simkv.costs.hardware.model_architecture import (
    Attention,
    DenseMlp,
    GatedDeltaNet,
    Gqa,
    Mamba,
    Mla,
    Mlp,
    MoeMlp,
)

LayerParts = tuple[Attention, Mlp]
#: Layer types by letter of Nemotron-H's layer pattern.
LAYER_TYPE_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _jamba(fields: ConfigFields) -> list[LayerParts]:
    """Return the layers of Jamba: Mamba-1, with periodic attention layers and expert layers."""
    hidden, layers = fields.number("hidden_size"), list[LayerParts]()
    inner = fields.number("mamba_expand") * hidden
    rank = fields.config.get("mamba_dt_rank", "auto")
    rank = -(-hidden // 16) if rank == "auto" else fields.number("mamba_dt_rank")
    state, conv = fields.number("mamba_d_state"), fields.number("mamba_d_conv")
    mamba, attention = Mamba(inner, state, conv, rank=rank), _attention(fields)
    experts, width = fields.number("num_experts"), fields.number("intermediate_size")
    moe = (
        MoeMlp(experts, fields.number("num_experts_per_tok"), width)
        if experts > 1
        else DenseMlp(width)
    )
    periods = [
        (fields.number(f"{kind}_layer_period"), fields.number(f"{kind}_layer_offset", least=0))
        for kind in ("attn", "expert")
    ]
    for layer in range(fields.number("num_hidden_layers")):
        attends, mixes = (layer % period == offset for period, offset in periods)
        layers.append((attention if attends else mamba, moe if mixes else DenseMlp(width)))
    return layers


def _granite(fields: ConfigFields) -> list[LayerParts]:
    """Return the layers of Granite 4: Mamba-2 and attention, all with or all without experts."""
    mlp: Mlp = DenseMlp(fields.number("shared_intermediate_size"))
    if experts := fields.number("num_local_experts", default=0, least=0):
        width, shared = fields.number("intermediate_size"), mlp.intermediate
        mlp = MoeMlp(experts, fields.number("num_experts_per_tok"), width, shared)
    kinds: dict[str, Attention] = {"mamba": _mamba2(fields), "attention": _attention(fields)}
    types = fields.config.get("layer_types", fields.config.get("layers_block_type"))
    return [(kinds[name], mlp) for name in _names(fields, "layer_types", types, kinds)]


def _bamba(fields: ConfigFields) -> list[LayerParts]:
    """Return the layers of Bamba: Mamba-2, with attention at the listed layer numbers."""
    attending = fields.config.get("attn_layer_indices") or []
    mamba, attention = _mamba2(fields), _attention(fields)
    mlp = DenseMlp(fields.number("intermediate_size"))
    depth = fields.number("num_hidden_layers")
    return [(attention if layer in attending else mamba, mlp) for layer in range(depth)]


def _falcon(fields: ConfigFields) -> list[LayerParts]:
    """Return the layers of Falcon-H1: each has Mamba-2 and attention, followed by one MLP."""
    mlp = DenseMlp(fields.number("intermediate_size"))
    one: list[LayerParts] = [(_mamba2(fields), DenseMlp(0)), (_attention(fields), mlp)]
    return one * fields.number("num_hidden_layers")


def _nemotron(fields: ConfigFields) -> list[LayerParts]:
    """Return the layers of Nemotron-H.

    In its config, Mamba-2, attention and ungated MLPs are separate layers. Here, an MLP belongs to
    the layer before it.
    """
    if fields.config.get("moe_latent_size"):
        raise fields.field_error("moe_latent_size", "not supported: it changes the layers")
    field = "hybrid_override_pattern"
    names = fields.config.get(field)
    if isinstance(names, str):
        names = [LAYER_TYPE_LETTERS.get(letter, letter) for letter in names]
    else:
        field = "layers_block_type"
        names = fields.config.get(field)
    number = str(fields.config.get("mamba_ssm_cache_dtype", "float32"))
    if number not in NUMBER_BYTES:
        raise fields.field_error(
            "mamba_ssm_cache_dtype", f"must be one of {', '.join(NUMBER_BYTES)}; got {number!r}"
        )
    heads, width = fields.number("mamba_num_heads"), fields.number("mamba_head_dim")
    mixers: dict[str, Attention] = {
        "mamba": Mamba(
            heads * width,
            fields.number("ssm_state_size"),
            fields.number("conv_kernel"),
            heads,
            fields.number("n_groups", "mamba_n_groups"),
            number_bytes=NUMBER_BYTES[number],
        ),
        "attention": _attention(fields),
    }
    layers: list[LayerParts] = []
    for name in _names(fields, field, names, [*LAYER_TYPE_LETTERS.values()]):
        if name in mixers:
            layers.append((mixers[name], DenseMlp(0)))
        elif not layers or layers[-1][1] != DenseMlp(0):
            raise fields.field_error(field, f"{name} must follow a mamba or attention layer")
        else:
            layers[-1] = (layers[-1][0], _ungated(fields, name))
    return layers


def _llama4(fields: ConfigFields) -> list[LayerParts]:
    """Return the layers of Llama 4: chunked or full attention, with periodic expert layers."""
    depth, width = fields.number("num_hidden_layers"), fields.number("intermediate_size")
    attention = _attention(fields)
    chunk = fields.number("attention_chunk_size", default=8192)
    local = replace(attention, window=chunk, chunked=True)
    rotary = fields.config.get("no_rope_layers") or [(i + 1) % 4 for i in range(depth)]
    if not isinstance(rotary, list) or len(rotary) != depth:
        raise fields.field_error(
            "no_rope_layers", f"must be a list of {depth} numbers, one number per layer"
        )
    step = fields.number("interleave_moe_layer_step", default=1)
    experts = fields.number("num_local_experts"), fields.number("num_experts_per_tok", default=1)
    return [
        (
            local if rotary[layer] else attention,
            DenseMlp(fields.number("intermediate_size_mlp"))
            if (layer + 1) % step
            else MoeMlp(*experts, width, width),
        )
        for layer in range(depth)
    ]


def _gemma4(fields: ConfigFields) -> list[LayerParts]:
    """Return the layers of Gemma 4: sliding-window attention, and full attention with wider heads.

    With ``attention_k_eq_v``, vLLM still stores V in addition to K. Experts are added to the MLP.
    """
    depth = fields.number("num_hidden_layers")
    window = replace(_attention(fields), window=fields.number("sliding_window"))
    whole = replace(window, window=0, head_dim=fields.number("global_head_dim", default=512))
    if fields.config.get("attention_k_eq_v") and fields.config.get("num_global_key_value_heads"):
        whole = replace(whole, kv_heads=fields.number("num_global_key_value_heads"))
    mlp: Mlp = DenseMlp(fields.number("intermediate_size"))
    if fields.config.get("enable_moe_block"):
        experts = fields.number("num_experts"), fields.number("top_k_experts")
        mlp = MoeMlp(*experts, fields.number("moe_intermediate_size"), mlp.intermediate)
    kinds = {"sliding_attention": window, "full_attention": whole}
    types = fields.config.get("layer_types")
    if types is None:
        types = [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(depth)
        ]
    return [(kinds[name], mlp) for name in _names(fields, "layer_types", types, kinds)]


def _kimi_linear(fields: ConfigFields) -> list[LayerParts]:
    """Return the layers of Kimi Linear.

    The listed layers, numbered from 1, have latent attention. All other layers have Kimi Delta
    Attention.
    """
    told = fields.config.get("linear_attn_config")
    if not isinstance(told, dict) or not isinstance(told.get("full_attn_layers"), list):
        raise fields.field_error(
            "linear_attn_config",
            "must contain full_attn_layers and the dimensions of the other layers",
        )
    linear = ConfigFields(told, f"{fields.where}, linear_attn_config")
    heads, width = linear.number("num_heads"), linear.number("head_dim")
    conv = linear.number("short_conv_kernel_size")
    delta = GatedDeltaNet(heads, heads, width, width, conv, gate_rank=width)
    latent = Mla(
        fields.number("num_attention_heads"),
        fields.number("q_lora_rank", default=0, least=0),
        fields.number("kv_lora_rank"),
        fields.number("qk_nope_head_dim"),
        fields.number("qk_rope_head_dim"),
        fields.number("v_head_dim"),
    )
    width = fields.number("moe_intermediate_size")
    shared = width * fields.number("num_shared_experts", default=0, least=0)
    experts = fields.number("num_experts"), fields.number("num_experts_per_token")
    dense, first = (
        DenseMlp(fields.number("intermediate_size")),
        fields.number("first_k_dense_replace"),
    )
    return [
        (
            latent if layer + 1 in told["full_attn_layers"] else delta,
            dense if layer < first else MoeMlp(*experts, width, shared),
        )
        for layer in range(fields.number("num_hidden_layers"))
    ]


def _ungated(fields: ConfigFields, name: str) -> Mlp:
    if name == "mlp":
        return DenseMlp(fields.number("intermediate_size"), gated=False)
    return MoeMlp(
        fields.number("n_routed_experts"),
        fields.number("num_experts_per_tok"),
        fields.number("moe_intermediate_size"),
        fields.number("moe_shared_expert_intermediate_size", default=0, least=0)
        * fields.number("n_shared_experts", default=1, least=0),
        gated=False,
    )


def _attention(fields: ConfigFields) -> Gqa:
    heads = fields.number("num_attention_heads")
    width = fields.number("head_dim", default=fields.number("hidden_size") // heads)
    return Gqa(heads, fields.number("num_key_value_heads", default=heads), width)


def _mamba2(fields: ConfigFields) -> Mamba:
    expanded = fields.number("mamba_expand", default=2) * fields.number("hidden_size")
    return Mamba(
        fields.number("mamba_d_ssm", default=expanded),
        fields.number("mamba_d_state"),
        fields.number("mamba_d_conv"),
        fields.number("mamba_n_heads"),
        fields.number("mamba_n_groups"),
    )


def _names(fields: ConfigFields, field: str, names: object, known: Collection[str]) -> list[str]:
    """Return the name of each layer, after checking that all names are in ``known``."""
    depth = fields.number("num_hidden_layers")
    if not isinstance(names, list) or len(names) != depth:
        raise fields.field_error(
            field, f"must have one value per layer ({depth}) from {', '.join(known)}"
        )
    for name in names:
        if name not in known:
            raise fields.field_error(
                field, f"unsupported layer type {name!r}; expected {' or '.join(known)}"
            )
    return names


#: Layer parsers by model type.
HYBRIDS: Mapping[str, Callable[[ConfigFields], list[LayerParts]]] = {
    "jamba": _jamba,
    "nemotron_h": _nemotron,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "falcon_h1": _falcon,
    "llama4_text": _llama4,
    "gemma4_text": _gemma4,
    "kimi_linear": _kimi_linear,
}
