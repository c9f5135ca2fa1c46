"""The steps and parts of steps that a calibration measures, the most useful first.

A part is measured by running all layers of the real model without the other parts. ``rest`` is the
step without attention. ``decode`` is only the attention of decodes, and ``prefill`` is only the
attention of prefills. ``mixed decode`` is the attention of decodes in a step with prefills, which
the kernel splits differently. ``step`` is a whole step as in serving. Half of the whole steps are
held out of every fit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from simkv.costs.step_load import StepLoad, count_attention_pairs
from simkv.gpu.graph_buckets import graph_sizes

ProbePart = Literal["rest", "decode", "mixed decode", "prefill", "step"]


@dataclass(frozen=True)
class Limits:
    """Limits of the measured steps.

    The limits are the number of decodes, the tokens per step, the context tokens per request, and
    the total KV tokens.
    """

    decodes: int = 256
    tokens: int = 8192
    context: int = 8192
    kv_tokens: int = 400_000
    block_size: int = 16


#: Limits for tests, and for the tiny model on a CPU.
SMALL_LIMITS = Limits(decodes=16, tokens=256, context=256, kv_tokens=2048)


class Probe(NamedTuple):
    """A step, or a part of a step, to measure.

    ``decodes`` contains the context length of each decode. ``prefills`` contains a pair (tokens,
    context) for each prefill.
    """

    part: ProbePart
    decodes: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        """Name that identifies a measurement."""
        rows = len(self.decodes)
        decodes = f"{rows}x{self.decodes[0]}" if rows else ""
        if len(set(self.decodes)) > 1:
            lengths = np.array(self.decodes, dtype="<i4").tobytes()
            decodes = f"{rows} of {sum(self.decodes)} ({zlib.crc32(lengths):08x})"
        prefills = " ".join(f"{tokens}+{context}" for tokens, context in self.prefills)
        return f"{self.part}|{decodes}|{prefills}"

    @property
    def load(self) -> StepLoad:
        """Load of the step, as input of a cost model."""
        return StepLoad(
            len(self.prefills),
            sum(tokens for tokens, _ in self.prefills),
            sum(context for _, context in self.prefills),
            len(self.decodes),
            sum(self.decodes),
            sum(count_attention_pairs(tokens, context) for tokens, context in self.prefills),
            longest=max(self.decodes, default=0),
        )


def plan_campaign(limits: Limits, seed: int = 0) -> list[Probe]:
    """Return the steps and parts of steps to measure, the most useful first.

    Steps of different kinds alternate. Within each kind, the sizes proceed from coarse to fine.
    """
    random = np.random.default_rng(seed)
    kinds = [
        _rest(limits),
        _decode(limits, random),
        _prefill(limits),
        _mixed_decode(limits, random),
        _steps(limits, random),
    ]
    fitting = [[p for p in points if _fits(p, limits)] for points in kinds]
    turns = max(map(len, fitting))
    ordered = [points[i] for i in range(turns) for points in fitting if i < len(points)]
    return list(dict.fromkeys(ordered))


def sentinel(limits: Limits) -> Probe:
    """Return the fixed step that is measured repeatedly to detect drift of the device."""
    context = min(512, limits.context // 2)
    return Probe("step", (context,) * min(64, limits.decodes, limits.kv_tokens // (2 * context)))


def _rest(limits: Limits) -> list[Probe]:
    """Return all sizes that have a graph, and some larger sizes for the linear range above them."""
    sizes = graph_sizes(limits.decodes, limits.tokens)
    decodes = [Probe("rest", (0,) * size.decodes) for size in sizes if not size.prefills]
    prefills = [
        Probe("rest", (), ((size.tokens, 0),))
        for size in sizes
        if size.prefills and not size.decodes
    ]
    large = [Probe("rest", (), ((t, 0),)) for t in (4096, 8192, 6144, 16384) if t <= limits.tokens]
    mixed = [Probe("rest", (0,), ((max(point.prefills[0][0] - 1, 2), 0),)) for point in prefills]
    # the time is linear between these sizes
    coarse = [*large[:2], *_coarse_first(decodes), *large[2:]]
    return [p for two in _in_turn(coarse, _coarse_first(prefills)) for p in two] + _coarse_first(
        mixed
    )[:6]


def _decode(limits: Limits, random: np.random.Generator) -> list[Probe]:
    """Return all combinations of batch size and context, and batches with skewed context
    lengths.
    """
    rows = [n for n in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512) if n <= limits.decodes]
    contexts = [c for c in (64, 512, 2048, 8192, 256, 1024, 4096) if c <= limits.context]
    even = [Probe("decode", (c,) * n) for c in contexts for n in _coarse_first(rows)]
    skewed = [
        Probe("decode", _lognormal(random, n, limits.context // 8, sigma, limits.context))
        for sigma in (0.7, 1.3)
        for n in rows
    ]
    return [p for two in _in_turn(even, skewed) for p in two]


def _mixed_decode(limits: Limits, random: np.random.Generator) -> list[Probe]:
    """Return points with decodes in a step with the shortest possible prefill."""
    rows = _coarse_first([n for n in (1, 4, 16, 64, 128, 256) if n <= limits.decodes])
    contexts = [c for c in (512, 4096, 2048, 128) if c <= limits.context]
    least = ((2, 0),)
    even = [Probe("mixed decode", (c,) * n, least) for c in contexts for n in rows]
    skewed = [
        Probe(
            "mixed decode", _lognormal(random, n, limits.context // 8, s, limits.context), ((2, 0),)
        )
        for s in (1.3, 0.7)
        for n in rows
    ]
    return [p for two in _in_turn(even, skewed) for p in two]


def _prefill(limits: Limits) -> list[Probe]:
    """Return prefills of one prompt after some context, of equal prompts, and of unequal
    prompts.
    """
    tokens = [t for t in (512, 2048, 128, 4096, 1024, 256, 64, 16) if t <= limits.tokens]
    contexts = [c for c in (0, 2048, 512, 8192, 128) if c <= limits.context]
    single = [Probe("prefill", (), ((t, c),)) for c in contexts for t in tokens]
    equal = [
        Probe("prefill", (), ((t // n, 0),) * n) for t in tokens for n in (2, 4, 16) if t // n >= 16
    ]
    unequal = [
        Probe("prefill", (), ((t // 4, c), (t - t // 4, 0)))
        for t in tokens[:4]
        for c in contexts[:2]
    ]
    return [p for two in _in_turn(single, [*equal, *unequal]) for p in two]


def _steps(limits: Limits, random: np.random.Generator) -> list[Probe]:
    """Return whole steps as in serving. Every other step contains prefills."""
    points = []
    for index in range(60):
        rows = int(np.exp(random.uniform(0, np.log(limits.decodes))))
        mean = limits.context / 8 * float(random.uniform(0.5, 1.5))
        decodes = _lognormal(random, max(rows, 1), mean, 0.7, limits.context)
        prefills: tuple[tuple[int, int], ...] = ()
        if index % 2:
            budget = int(np.exp(random.uniform(np.log(16), np.log(limits.tokens))))
            count = int(random.integers(1, 4))
            context = int(random.integers(0, limits.context // 2)) if index % 4 == 1 else 0
            prefills = ((max(budget // count, 2), context),) * count
        points.append(Probe("step", decodes if index % 6 != 5 else (), prefills))
    return points


def _lognormal(
    random: np.random.Generator, count: int, mean: float, sigma: float, most: int
) -> tuple[int, ...]:
    drawn = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return tuple(int(x) for x in np.clip(drawn, 1, most))


def _coarse_first(points: Sequence[Any]) -> list[Any]:
    """Return the points in the order: ends, middle, quarters, and so on."""
    order = {0: None, len(points) - 1: None}
    step = len(points)
    while step > 1:
        step = -(-step // 2)
        order |= dict.fromkeys(range(0, len(points), step))
    return [points[i] for i in order if 0 <= i < len(points)]


def _in_turn(*kinds: Sequence[Probe]) -> Iterator[list[Probe]]:
    for i in range(max(map(len, kinds))):
        yield [points[i] for points in kinds if i < len(points)]


def _fits(point: Probe, limits: Limits) -> bool:
    load = point.load
    whole = load.decode_context + load.decode_seqs + load.prefill_context + load.prefill_tokens
    rows = load.decode_seqs + load.prefill_seqs
    return (
        whole + rows * limits.block_size <= limits.kv_tokens
        and load.prefill_tokens <= limits.tokens
    )
