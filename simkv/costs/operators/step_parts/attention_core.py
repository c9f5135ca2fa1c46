"""Attention of all layers without its projections: grids for prefills and decodes, and recurrent
layers.
"""

from __future__ import annotations

from dataclasses import replace

from simkv.costs.attention_grid import AttentionGrid
from simkv.costs.hardware.model_architecture import (
    GatedDeltaNet,
    Gqa,
    Mamba,
    Mla,
    Recurrent,
)
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.lookup.attention_lookup import prompt_pairs
from simkv.costs.operators.operator_times import DeltaNetShape, Lookup, OperatorTimes
from simkv.costs.operators.piecewise_curve import round_to_four_digits
from simkv.costs.operators.step_parts.step_part import StepPart

PREFILL_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 32768)
#: Lengths of the measured prompts; the mean number of attended tokens is half the length.
PREFILL_LENGTHS = (
    1,
    15,
    63,
    127,
    255,
    511,
    1023,
    2047,
    4095,
    8191,
    16383,
    32767,
    65535,
    131071,
    262143,
)
DECODE_SEQS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
#: Tokens between the states that the scan of a prompt stores (``chunk_size`` of Mamba-2).
SCAN_CHUNK_TOKENS = 256
DECODE_CONTEXTS = (
    1,
    64,
    128,
    256,
    512,
    1024,
    2048,
    4096,
    8192,
    16384,
    32768,
    65536,
    131072,
    262144,
)


def attention_grid(operators: OperatorTimes, hardware: Hardware) -> AttentionGrid | None:
    """Return the attention times of all layers with KV, or None for a model without such layers."""
    kinds: dict[Gqa | Mla, int] = {}
    for part in hardware.architecture.layers:
        if not isinstance(part.attention, Recurrent):
            kinds[part.attention] = kinds.get(part.attention, 0) + part.count
    if not kinds:
        return None
    prefills = [(count, *_prefill(operators, hardware, kind)) for kind, count in kinds.items()]
    decodes = [(count, _decode(operators, hardware, kind)) for kind, count in kinds.items()]
    means = [(length + 1) / 2 for length in PREFILL_LENGTHS]
    return AttentionGrid(
        prefill_tokens=[float(tokens) for tokens in PREFILL_TOKENS],
        prefill_mean=means,
        prefill_s=_never_falling(
            [
                [
                    sum(count * _prompt(look, window, t, m) for count, look, window in prefills)
                    for m in means
                ]
                for t in PREFILL_TOKENS
            ]
        ),
        decode_seqs=[float(seqs) for seqs in DECODE_SEQS],
        decode_context=[float(context) for context in DECODE_CONTEXTS],
        decode_s=_never_falling(
            [
                [sum(count * look(b, c) for count, look in decodes) for c in DECODE_CONTEXTS]
                for b in DECODE_SEQS
            ]
        ),
    )


def recurrence_parts(operators: OperatorTimes, hardware: Hardware) -> list[StepPart]:
    """Return the parts of the step time for layers with a recurrent state.

    The result also includes the absorbed projections of MLA decodes.
    """
    model, tp = hardware.architecture, hardware.tp
    parts = []
    for layers in model.layers:
        kind = layers.attention
        if isinstance(kind, GatedDeltaNet):
            heads = max(kind.k_heads // tp, 1), kind.v_heads // tp
            shape = DeltaNetShape(model.hidden, *heads, kind.k_dim, kind.v_dim, kind.conv)
            prompt = operators.delta(shape, "context").times(layers.count)
            decode = operators.delta(shape, "generation").times(layers.count)
            parts += [
                StepPart("gated delta net, prompts", "prefill_tokens", prompt),
                StepPart("gated delta net, decodes", "decode_seqs", decode),
            ]
        elif isinstance(kind, Mamba):
            parts += _state_space(operators, kind, tp, layers.count)
        elif isinstance(kind, Mla) and not kind.sparse:
            curve = operators.absorbed(_share(kind, tp)).times(layers.count)
            parts.append(StepPart("absorbed projections", "decode_seqs", curve))
    return parts


def _state_space(operators: OperatorTimes, kind: Mamba, tp: int, layers: int) -> list[StepPart]:
    """Return the parts of Mamba layers, estimated from the moved bytes.

    A decode reads and writes its state once. A prompt reads and writes its state once per
    ``SCAN_CHUNK_TOKENS`` tokens.
    """
    operators.notes["Mamba convolution and scan: estimated from the bytes moved"] = None
    state, seen = 2 * kind.state_bytes(tp), 4.0 * kind.channels(tp) / tp
    prompt = operators.elementwise(seen + state / SCAN_CHUNK_TOKENS).times(layers)
    decode = operators.elementwise(seen + state).times(layers)
    through = operators.elementwise(seen).times(layers)
    return [
        StepPart("state space, prompts", "prefill_tokens", prompt),
        StepPart("state space, decodes", "decode_seqs", decode),
        StepPart("state space, convolution", "slots", through),
    ]


def _share(kind: Mla, tp: int) -> Mla:
    return replace(kind, heads=kind.heads // tp)


def _gqa_share(kind: Gqa, tp: int) -> Gqa:
    return replace(
        kind,
        heads=kind.heads // tp,
        kv_heads=max(kind.kv_heads // tp, 1),
        output_gate=False,
        chunked=False,
    )


def _prefill(operators: OperatorTimes, hardware: Hardware, kind: Gqa | Mla) -> tuple[Lookup, int]:
    """Return the attention time of prompts in one layer, and the maximum number of attended tokens.

    The maximum is 0 if there is no limit.
    """
    if isinstance(kind, Gqa):
        if kind.chunked:
            operators.notes[
                "chunked attention: time of a sliding window of the same length, an upper bound"
            ] = None
        return operators.prefill(_gqa_share(kind, hardware.tp), hardware.kv), kind.window
    hidden = hardware.architecture.hidden
    look = operators.mla_prefill(_share(kind, hardware.tp), hidden, hardware.attention, hardware.kv)
    return look, kind.sparse.topk if kind.sparse else 0


def _decode(operators: OperatorTimes, hardware: Hardware, kind: Gqa | Mla) -> Lookup:
    if isinstance(kind, Gqa):
        return operators.decode(_gqa_share(kind, hardware.tp), hardware.kv)
    hidden = hardware.architecture.hidden
    return operators.mla_decode(_share(kind, hardware.tp), hidden, hardware.attention, hardware.kv)


def _prompt(look: Lookup, window: int, tokens: float, mean: float) -> float:
    """Return the attention time of ``tokens`` tokens that attend to ``mean`` tokens each, on
    average.

    The tokens are treated as prompts of the length at which tokens attend to ``mean`` tokens. If
    this length exceeds ``tokens``, they are treated as a chunk after cached tokens. A chunk takes
    as long as a prompt with the same number of attention pairs.
    """
    length = 2 * mean - 1
    if length <= tokens:
        return look(tokens / length, length)
    if not window or tokens * mean <= prompt_pairs(window):
        return look(1, _length_of(tokens * mean))
    pairs = tokens * min(mean, window)
    return look(1, max(tokens, pairs / window + (window - 1) / 2))


def _length_of(pairs: float) -> float:
    """Return the length of a prompt with the given number of attention pairs (token, attended
    token).
    """
    return float(((8 * pairs + 1) ** 0.5 - 1) / 2)


def _never_falling(plane: list[list[float]]) -> list[list[float]]:
    """Reduce each value to the minimum over all larger indices, rounded to four digits."""
    for row in plane:
        for i in range(len(row) - 2, -1, -1):
            row[i] = min(row[i], row[i + 1])
    for i in range(len(plane) - 2, -1, -1):
        plane[i] = [min(pair) for pair in zip(plane[i], plane[i + 1], strict=True)]
    return [round_to_four_digits(row) for row in plane]
