"""The measurement campaign: what the parts of a step cost on this device, point by point.

A step is taken apart by leaving parts of the real model out, all layers running: ``rest`` is the
step without attention, ``decode`` and ``prefill`` are the attention of these rows alone. Whole
steps (``step``) like those of serving are measured too; half of them is held out of every fit.

Points come in order of use, each twice, in an independently shuffled order within small batches;
a sentinel before every batch shows drift. Every measurement is appended to a CSV file at once, and
a campaign that is started again goes on where it stopped.
"""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_type_hints

import numpy as np
import torch

from simkv.errors import InputError
from simkv.executors import Load, pairs
from simkv.gpu.buckets import graph_sizes, step_size
from simkv.gpu.graphs import capture
from simkv.gpu.inputs import Fields, StepSize, fields_of, fill, packed_length
from simkv.gpu.machine import SMI_FIELDS, nvidia_smi
from simkv.gpu.pool import HostBlocks, Layout, swap_in, swap_out
from simkv.gpu.runner import Runner, RunnerConfig
from simkv.gpu.shapes import ModelShape
from simkv.schedulers.base import Row, blocks_for

Part = Literal["rest", "decode", "prefill", "step", "swap out", "swap in"]
BATCH = 20


@dataclass(frozen=True)
class Limits:
    """How far a campaign goes: rows that decode, tokens in a step, tokens of context per row, and
    tokens of KV in all."""

    decodes: int = 256
    tokens: int = 8192
    context: int = 8192
    kv_tokens: int = 400_000
    block_size: int = 16


#: For the tests, and for a look at the tiny model on a CPU.
SMALL = Limits(decodes=16, tokens=256, context=256, kv_tokens=2048)


class Point(NamedTuple):
    """Something to measure: contexts of the rows that decode, and (tokens, context) of prefills.

    A swap has one number in ``decodes``: its blocks.
    """

    part: Part
    decodes: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        """A name by which a measurement is found again."""
        rows = len(self.decodes)
        decodes = f"{rows}x{self.decodes[0]}" if rows else ""
        if len(set(self.decodes)) > 1:
            lengths = np.array(self.decodes, dtype="<i4").tobytes()
            decodes = f"{rows} of {sum(self.decodes)} ({zlib.crc32(lengths):08x})"
        prefills = " ".join(f"{tokens}+{context}" for tokens, context in self.prefills)
        return f"{self.part}|{decodes}|{prefills}"

    @property
    def load(self) -> Load:
        """What the simulator would say of such a step."""
        return Load(
            len(self.prefills),
            sum(tokens for tokens, _ in self.prefills),
            sum(context for _, context in self.prefills),
            len(self.decodes),
            sum(self.decodes),
            sum(pairs(tokens, context) for tokens, context in self.prefills),
        )


class Sample(NamedTuple):
    """One measurement: seconds at the median and the tenth and ninetieth percentile of repeats.

    ``at_s`` is the time since the campaign began; ``size`` what the step was padded to.
    """

    key: str
    passed: int
    part: str
    prefill_seqs: int
    prefill_tokens: int
    prefill_context: int
    decode_seqs: int
    decode_context: int
    prefill_pairs: int
    longest: int
    size: str
    median_s: float
    p10_s: float
    p90_s: float
    repeats: int
    at_s: float


def plan(limits: Limits, seed: int = 0) -> list[Point]:
    """All points, the most useful first: each kind coarse before fine, the kinds in turn."""
    random = np.random.default_rng(seed)
    kinds = [
        _rest(limits),
        _decode(limits, random),
        _prefill(limits),
        _steps(limits, random),
        [Point(part, (n,)) for n in (16, 1, 64, 4) for part in ("swap out", "swap in")],
    ]
    fitting = [[p for p in points if _fits(p, limits)] for points in kinds]
    turns = max(map(len, fitting))
    ordered = [points[i] for i in range(turns) for points in fitting if i < len(points)]
    return list(dict.fromkeys(ordered))


def sentinel(limits: Limits) -> Point:
    """What is measured again and again to see the device drift."""
    context = min(512, limits.context // 2)
    return Point("step", (context,) * min(64, limits.decodes, limits.kv_tokens // (2 * context)))


def _rest(limits: Limits) -> list[Point]:
    """Every size that has a graph; and twice the largest ones without."""
    sizes = graph_sizes(limits.decodes, limits.tokens)
    decodes = [Point("rest", (0,) * size.decodes) for size in sizes if not size.prefills]
    prefills = [
        Point("rest", (), ((size.tokens, 0),))
        for size in sizes
        if size.prefills and not size.decodes
    ]
    large = [Point("rest", (), ((t, 0),)) for t in (4096, 8192, 16384) if t <= limits.tokens]
    mixed = [Point("rest", (0,), ((max(point.prefills[0][0] - 1, 2), 0),)) for point in prefills]
    coarse = [*_coarse_first(decodes), *large]
    return [p for two in _in_turn(coarse, _coarse_first(prefills)) for p in two] + _coarse_first(
        mixed
    )[:6]


def _decode(limits: Limits, random: np.random.Generator) -> list[Point]:
    """Rows crossed with contexts, and skewed lengths at the same mean."""
    rows = [n for n in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512) if n <= limits.decodes]
    contexts = [c for c in (64, 512, 2048, 8192, 256, 1024, 4096) if c <= limits.context]
    even = [Point("decode", (c,) * n) for c in contexts for n in _coarse_first(rows)]
    skewed = [
        Point("decode", _lognormal(random, n, limits.context // 8, sigma, limits.context))
        for sigma in (0.7, 1.3)
        for n in rows
    ]
    return [p for two in _in_turn(even, skewed) for p in two]


def _prefill(limits: Limits) -> list[Point]:
    """One prompt after some context, several equal ones, and pairs of unequal ones."""
    tokens = [t for t in (512, 2048, 128, 4096, 1024, 256, 64, 16) if t <= limits.tokens]
    contexts = [c for c in (0, 2048, 512, 8192, 128) if c <= limits.context]
    single = [Point("prefill", (), ((t, c),)) for c in contexts for t in tokens]
    equal = [
        Point("prefill", (), ((t // n, 0),) * n) for t in tokens for n in (2, 4, 16) if t // n >= 16
    ]
    unequal = [
        Point("prefill", (), ((t // 4, c), (t - t // 4, 0)))
        for t in tokens[:4]
        for c in contexts[:2]
    ]
    return [p for two in _in_turn(single, [*equal, *unequal]) for p in two]


def _steps(limits: Limits, random: np.random.Generator) -> list[Point]:
    """Whole steps like those of serving, every other one mixed; some of one prefill alone."""
    points = []
    for index in range(60):
        rows = int(np.exp(random.uniform(0, np.log(limits.decodes))))
        mean = limits.context / 8 * float(random.uniform(0.5, 1.5))
        decodes = _lognormal(random, max(rows, 1), mean, 0.7, limits.context)
        prefills: tuple[tuple[int, int], ...] = ()
        if index % 2:
            budget = int(random.integers(16, max(limits.tokens // 4, 32)))
            count = int(random.integers(1, 4))
            context = int(random.integers(0, limits.context // 2)) if index % 4 == 1 else 0
            prefills = ((max(budget // count, 2), context),) * count
        points.append(Point("step", decodes if index % 6 != 5 else (), prefills))
    return points


def _lognormal(
    random: np.random.Generator, count: int, mean: float, sigma: float, most: int
) -> tuple[int, ...]:
    drawn = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return tuple(int(x) for x in np.clip(drawn, 1, most))


def _coarse_first(points: Sequence[Any]) -> list[Any]:
    """The ends, the middle, the quarters, and so on."""
    order = {0: None, len(points) - 1: None}
    step = len(points)
    while step > 1:
        step = -(-step // 2)
        order |= dict.fromkeys(range(0, len(points), step))
    return [points[i] for i in order if 0 <= i < len(points)]


def _in_turn(*kinds: Sequence[Point]) -> Iterator[list[Point]]:
    for i in range(max(map(len, kinds))):
        yield [points[i] for points in kinds if i < len(points)]


def _fits(point: Point, limits: Limits) -> bool:
    load = point.load
    if point.part in ("swap out", "swap in"):
        return 2 * point.decodes[0] * limits.block_size <= limits.kv_tokens
    whole = load.decode_context + load.decode_seqs + load.prefill_context + load.prefill_tokens
    rows = load.decode_seqs + load.prefill_seqs
    return (
        whole + rows * limits.block_size <= limits.kv_tokens
        and load.prefill_tokens <= limits.tokens
    )


class Bench:
    """A model with its cache full of random numbers, and a way to time a point on it."""

    def __init__(
        self, shape: ModelShape, limits: Limits, device: str, layout: Layout = "block"
    ) -> None:
        self.limits = limits
        config = RunnerConfig(
            num_blocks=limits.kv_tokens // limits.block_size,
            block_size=limits.block_size,
            seats=limits.decodes + 64,
            max_len=limits.context + limits.tokens + 8,
            max_decodes=limits.decodes,
            graph_tokens=0,
            layout=layout,
        )
        self.runner = Runner(shape, config, device)
        self.model = self.runner.model
        # Never zeros: a device can be faster on them.
        for block in self.runner.pool.blocks.split(256):
            block.normal_()
        vocab = (self.model.seats + 1, self.model.max_len)
        self.model.tokens.copy_(torch.randint(0, shape.vocab, vocab, dtype=torch.int32))
        self.host = HostBlocks(self.runner.pool, 64)
        self.on_gpu = self.runner.on_gpu
        self._random = np.random.default_rng(0)

    def time(self, point: Point, repeats: int) -> list[float]:
        """Seconds of each of ``repeats`` runs; one more, the first, is thrown away."""
        run = self._run(point)
        if not self.runner.on_gpu:
            return [_host_seconds(run) for _ in range(repeats + 1)][1:]
        if point.part not in ("swap out", "swap in"):
            run = capture(run)[0].replay
        run()
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000.0 for begin, end in events]

    def difference(self, point: Point, ops: Any, others: Any) -> float:
        """Relative difference of attention by ``ops`` and by ``others`` in the first layer."""
        size = self.size(point)
        fields = self._fields(point, size)
        q = self._queries(size)
        keys, values = self.runner.pool.layer(0)
        count = len(point.decodes) + sum(tokens for tokens, _ in point.prefills)
        a, b = (
            o.attend(q, fields, size, keys, values, self.model.tables)[:count].float()
            for o in (ops, others)
        )
        return float((a - b).norm() / a.norm())

    def size(self, point: Point) -> StepSize:
        """What a step like this is padded to."""
        tokens = len(point.decodes) + sum(t for t, _ in point.prefills)
        return step_size(
            len(point.decodes), len(point.prefills), tokens, self.runner.config.max_decodes
        )

    def _run(self, point: Point) -> Callable[[], Any]:
        if point.part in ("swap out", "swap in"):
            count = point.decodes[0]
            blocks = [1 + 2 * i for i in range(count)]  # never two in a row, as in a used pool
            move = swap_out if point.part == "swap out" else swap_in
            return lambda: move(self.runner.pool, blocks, self.host, range(count))
        size = self.size(point)
        fields = self._fields(point, size)
        if point.part == "step":
            return lambda: self.model.step(fields, size)
        if point.part == "rest":
            return lambda: self._without_attention(fields, size)
        q = self._queries(size)
        return lambda: self._attention_only(q, fields, size)

    def _queries(self, size: StepSize) -> torch.Tensor:
        shape, pool = self.model.shape, self.runner.pool.data
        return torch.randn(
            size.tokens, shape.heads, shape.head_dim, device=pool.device, dtype=pool.dtype
        )

    def _fields(self, point: Point, size: StepSize) -> Fields:
        """Inputs of a point, its rows in random blocks."""
        decodes = [Row(i, 1, context) for i, context in enumerate(point.decodes)]
        prefills = [
            Row(i, tokens, context)
            for i, (tokens, context) in enumerate(point.prefills, len(decodes))
        ]
        free = self._random.permutation(np.arange(1, self.runner.pool.num_blocks + 1))
        for row in (*decodes, *prefills):
            count = blocks_for(row.context + row.tokens, self.limits.block_size)
            taken, free = free[:count], free[count:]
            self.model.tables[row.id, :count] = torch.from_numpy(taken.astype(np.int32)).to(
                self.runner.device
            )
        packed = np.zeros(packed_length(size), dtype=np.int32)
        seats = {row.id: row.id for row in (*decodes, *prefills)}
        fill(fields_of(packed, size), decodes, prefills, seats, seats, self.model.seats)
        return fields_of(torch.from_numpy(packed).to(self.runner.device), size)

    def _without_attention(self, fields: Fields, size: StepSize) -> torch.Tensor:
        ops = self.model.ops
        self.model.ops = _WithoutAttention(ops)
        try:
            return self.model.step(fields, size)
        finally:
            self.model.ops = ops

    def _attention_only(self, q: torch.Tensor, fields: Fields, size: StepSize) -> torch.Tensor:
        out = q
        for index in range(self.model.shape.layers):
            keys, values = self.runner.pool.layer(index)
            out = self.model.ops.attend(q, fields, size, keys, values, self.model.tables)
        return out


class _WithoutAttention:
    """The model's operations, with attention handing its queries on."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(self, q: torch.Tensor, *_: Any) -> torch.Tensor:
        return q


def _host_seconds(run: Callable[[], Any]) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def measure(
    bench: Bench,
    points: Sequence[Point],
    path: Path,
    budget_s: float,
    *,
    repeats: int = 20,
    passes: int = 2,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Measure ``points`` until all are done or the time is over; append to the CSV at ``path``.

    What is in the file already is not measured again. Returns all that is in it at the end.
    """
    begin = perf_counter()
    _mend(path)
    done = {(sample.key, sample.passed) for sample in read_samples(path)}
    earlier = max((sample.at_s for sample in read_samples(path)), default=0.0)
    random = np.random.default_rng(seed)
    watch = sentinel(bench.limits)
    for start in range(0, len(points), BATCH):
        batch = points[start : start + BATCH]
        for passed in range(passes):
            order = [watch, *(batch[i] for i in random.permutation(len(batch)))]
            for index, point in enumerate(order):
                turn = passed if index else passed + passes * (start // BATCH)
                key = point.key if index else f"sentinel {point.key}"
                if (key, turn) in done:
                    continue
                if perf_counter() - begin > budget_s:
                    return read_samples(path)
                if not index and bench.on_gpu:
                    _note_clocks(path.with_name("clocks.csv"), earlier + perf_counter() - begin)
                seconds = bench.time(point, repeats)
                at = earlier + perf_counter() - begin
                _append(path, _sample(bench, point, key, turn, seconds, at))
                progress()
    return read_samples(path)


def _sample(
    bench: Bench, point: Point, key: str, passed: int, seconds: list[float], at: float
) -> Sample:
    low, median, high = np.percentile(seconds, (10, 50, 90))
    longest = max((*point.decodes, *(t + c for t, c in point.prefills)), default=0)
    swap = point.part in ("swap out", "swap in")
    load = Load(0, 0, 0, 0, 0) if swap else point.load
    size = f"{point.decodes[0]} blocks" if swap else "x".join(map(str, bench.size(point)))
    spread = (float(median), float(low), float(high))
    return Sample(key, passed, point.part, *load[:6], longest, size, *spread, len(seconds), at)


def _append(path: Path, sample: Sample) -> None:
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(Sample._fields)
        writer.writerow(sample)


def _note_clocks(path: Path, at_s: float) -> None:
    """Append what the device says of itself: it can throttle in the middle of a campaign."""
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if new:
            file.write(f"at_s,{SMI_FIELDS}\n")
        file.write(f"{at_s:.3f},{nvidia_smi().replace(', ', ',')}\n")


def _mend(path: Path) -> None:
    """Drop a last line that was cut short."""
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def read_samples(path: Path) -> list[Sample]:
    """All measurements of a file; none if there is no file. Raises InputError."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or tuple(rows[0]) != Sample._fields:
        raise InputError(f"{path}: not measurements of this version of simkv")
    kinds = get_type_hints(Sample).values()
    return [
        Sample(*(kind(value) for kind, value in zip(kinds, row, strict=True))) for row in rows[1:]
    ]


def check_same(path: Path, about: dict[str, Any]) -> None:
    """Write what a campaign is about beside its measurements, or compare with what is there.

    Raises InputError if the measurements there were made of something else.
    """
    if not path.exists():
        path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    for name in ("shape", "limits", "device", "torch", "version", "layout"):
        if there.get(name) != about[name]:
            raise InputError(
                f"{path}: {name} was {there.get(name)}, now {about[name]}; use another --out"
            )
